"""Python values as JSON and tensors, restored exactly and without running code.

Checkpoints hold values in this form, and ranks send values to each other in it. Reading it makes
values of the types below, and never calls anything that it names. ::

    value_types     the types of values and tensors, on which writing and reading agree
    encoding        a value to JSON and tensors
    untrusted_json  JSON of unknown origin, checked before anything is made from it
    decoding        JSON and tensors of unknown origin to a value

Values that JSON has stay as they are: None, bool, int of 64 bits, finite float, str, list, and dict
with keys that are str and do not begin with ``$``. Any other value is an object of one member::

    {"$int": "-0x1f"}                 an int of up to 4096 bits, in hex
    {"$float": "7ff8000000000000"}    the bits of a float that is not finite, in hex
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

Keys and members of sets are numbers, str, bytes, None, dtypes, devices, and tuples of these. Other
classes, including subclasses of these, are refused when they are written, because they would not be
restored exactly. Attributes that were added to a value, and whether a tensor requires gradients,
are not saved; tensors are restored on the CPU.
"""
