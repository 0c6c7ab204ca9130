"""Checkpoints: what a job has at one step, in files that any number of ranks can read back.

::

    api            save, async_save, load, steps
    items          the objects of a call by kind, and the group that shares them

    saving         how ranks save together, in six steps
    sections       what is saved beside tensors: the JSON of each rank, merged for the manifest
    optimizers     the state of an optimizer as a section and ranges of tensors
    random_states  the random generators of a rank
    write_items    the ranges that this rank writes, and the tensors that those of all ranks make up
    async_save     a save that another thread writes during training

    loading        how ranks load together, in five steps
    load_plan      the memory of this rank that each saved range is read into, and what does not fit
    optimizer_loading  the state of an optimizer, in memory that is read later
    tried_steps    whether another job has removed or replaced the steps of a load meanwhile
    saved_step     one committed step, open for reading

    format         the specification of the files, and the manifest
    records        the records of a manifest, their names and limits
    consistency    checks that a manifest does not contradict itself
    header         the header of a safetensors file
    checksum       XXH3-64
    reshard        arithmetic of ranges: the share that a copy writes, the pieces that a range is in
    tensors        the bytes of tensors
    place          the place that a user names: a folder on a disk, or a URL
    step_storage   what saving and loading ask of a place
    object_store   steps in an object store
    store_path     places in a store, and calls to it that end in time
    files          files and folders that are complete or do not exist
    save_lock      one save at a time writes into a folder
    coordinator    an error on one rank is raised on all
    convert        checkpoints in the formats of other tools, and back

A tensor has three forms on its way: a ``TensorShard`` is what a rank holds, a ``WriteItem`` is the
part of it that the rank writes, and a ``SavedTensor`` with its pieces is its record in the
manifest. On the way back, a ``ReadItem`` is a range of a saved tensor and the memory for it.

**To add a field to the manifest**, change two files. In ``format``: specify it in the docstring,
raise ``SCHEMA``, and add it to ``Manifest``, ``_MEMBERS``, ``_fields`` and ``_manifest``. In
``saving``: pass its value to the ``Manifest``. The first test to fail is in
``tests/checkpoint/test_format.py``, whose examples are in ``tests/checkpoint/manifests.py``.

``echelon.values`` says how Python values are written. No file holds a pickle, and reading one never
runs what is in it.
"""
