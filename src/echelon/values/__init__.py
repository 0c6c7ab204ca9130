"""Python values as JSON and tensors, and back: exactly, and nothing else.

Checkpoints hold values in this form, and ranks send them to each other in it: reading it makes
values of the kinds below, and never runs what is in it. ::

    value_types     which values and tensors there are: what writing and reading agree on
    encoding        a value into JSON and tensors
    untrusted_json  JSON of unknown origin, checked before anything is made from it
    decoding        and back into a value, whoever wrote it

What JSON has, it is: None, bool, int of 64 bits, float that is finite, str, list, and dict with
keys that are str and do not begin with ``$``. Anything else is an object of one member::

    {"$int": "-0x1f"}                 an int of up to 4096 bits, in hex
    {"$float": "7ff8000000000000"}    a float that is no finite number: its bits, in hex
    {"$complex": [1.0, -1.0]}
    {"$bytes": "QUI="}                in base64
    {"$tuple": [...]}
    {"$range": [START, STOP, STEP]}
    {"$deque": [[...], MAXLEN]}
    {"$set": [...]}                   members in the order of their JSON
    {"$frozenset": [...]}
    {"$dict": [[KEY, VALUE], ...]}    a dict with other keys
    {"$ordered": [[KEY, VALUE], ...]}  an OrderedDict
    {"$counter": [[KEY, VALUE], ...]}  a Counter
    {"$tensor": PATH}                 the tensor that is saved under this path
    {"$ndarray": PATH}                the same as an array of NumPy
    {"$scalar": ["int8", "ff"]}       of NumPy: its dtype, and its bytes in hex, little-endian
    {"$dtype": "float32"}             of PyTorch, and so the others
    {"$device": "cuda:0"}
    {"$size": [2, 3]}

Keys and members of sets are numbers, str, bytes, None, dtypes, devices, and tuples of these.
A class that is not in this list, a subclass of one that is included, is refused when it is
written: it would not come back as itself. So nothing that is loaded is ever called by its name.
Attributes that somebody has put on a value are not part of it, nor is whether a tensor requires
gradients; tensors come back on the CPU.
"""
