"""Groups of ranks, and every call that moves tensors between them.

In reading order::

    group             what users call: collectives, messages, subgroups, windows
    primitives        what transports carry: five collectives and two messages
    derived           the other collectives, each made of one primitive
    transport         what a world writes so that its ranks form a group
    call_arguments    what arguments must be
    buffers           tensors and bytes as 1D buffers
    torch_function    calls of torch that no mode of a user acts on
    profiler_spans    calls as spans of ``torch.profiler``
    compiler_bypass   code that ``torch.compile`` runs as it is
    group_tree        which group was made from which, and what happens before the world closes
    work              communication under way, and windows
    reduce_op         the operations of reductions, the order of sums, and the division of a mean
    ordered_executor  runs the collectives of a group in the order of their issue
    objects           bytes and objects between ranks
    object_bytes      objects as bytes that run no code when they are read
    agreement         whether ranks hold the same model, options and facts
    start_facts       what ranks compare when a world starts
    secret            by which the ranks of a job authenticate each other
    mesh, world       ranks on named axes; the job as a script sees it
    streams           CPU and CUDA behind one interface
    threads           the world of simulated ranks
    shm               the world of processes of one host
    torch_dist        worlds over the engines of ``torch.distributed``
    lone              one rank without its peers, which are taken to be like it

To add a collective: ``derived`` (how it is made of a primitive), ``group`` (one method), and a test
that runs it in all worlds. To add a world: a folder here with a subclass of ``Group`` that writes
what ``transport`` lists, and its start in ``launch.run``. ``docs/extending.md`` has the recipes.
"""
