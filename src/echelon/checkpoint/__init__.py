"""Checkpoints: what a job has at one step, in files that any number of ranks can read back.

::

    api            save, async_save, load, steps
    items          what a call was given, sorted by what it is, and which ranks share it

    saving         how ranks save together: [1] agree, [2] write, [3] report, [4] commit
    sections       what is saved beside tensors: the JSON of each rank, and of all together
    optimizers     an optimizer as a section and ranges of tensors; and its way back
    random_states  the random generators of a rank
    write_items    which ranges this rank writes, and what all ranks' ranges make up
    async_save     a save that goes on while training does

    loading        how ranks load together: [1] choose, [2] plan, [3] verify, [4] install, [5] fill
    load_plan      which saved range goes into which memory of this rank, and what does not fit
    saved_step     one committed step, open for reading

    format         what the files are; its docstring is the specification, and it has the manifest
    records        what the manifest says of files and tensors, their names, and limits
    consistency    what must be true of a manifest
    header         the beginning of a safetensors file
    checksum       what tells bytes from other bytes
    reshard        the arithmetic of ranges: who writes what of a copy, and where a range lies
    tensors        the bytes of tensors in memory
    files          files that are there whole or not at all, and folders that appear by one rename
    coordinator    what one rank cannot do, all of them raise
    convert        checkpoints in the forms of other tools, and back

A tensor has three forms on its way: a ``TensorShard`` is what a rank holds, a ``WriteItem`` is what
it writes of it and where, and a ``SavedTensor`` with its pieces is what the manifest says.
On the way back, a ``ReadItem`` is a range of a saved tensor and the memory it goes into.

**To add a field to the manifest**, change two files. In ``format``: say in the specification what
it is, raise ``SCHEMA``, and add it to ``Manifest``, ``_MEMBERS``, ``_fields`` and ``_manifest``. In
``saving``: give its value where the ``Manifest`` is made. The first test to fail is that of
``tests/checkpoint/test_format.py``, whose examples are in ``tests/checkpoint/manifests.py``.

``echelon.values`` says how Python values are written. No file holds a pickle, and reading one never
runs what is in it.
"""
