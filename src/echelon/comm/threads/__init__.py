"""The world of simulated ranks: threads of one process that hand each other their tensors.

One rank runs at a time, from one wait to the next. A turn, with the verbs that ``turns`` lists::

    rank 0                  the process                rank 1
    all_reduce, joins
    sleep: hand on ───────► saves the state of rank 0
                            puts in that of rank 1 ──► take turn
                                                       all_reduce, joins last: does the work
                            rank 0 wants a turn ◄───── wake rank 0
                                                       goes on, barrier
                            saves that of rank 1 ◄──── sleep: hand on
    take turn ◄──────────── puts in that of rank 0
    resume: goes on

In reading order::

    group               what ranks call: the last to join a communication does the work of all
    pending             a communication until all its ranks have joined it
    rank_rules          what an operation waits for: matching by tags, or one queue as in NCCL
    thread_world        who waits for whom: deadlocks, limits of time, failures
    worker_threads      ranks that communicate from several threads
    call_watch          how somebody looks at calls, as ``ec.step_through`` does

    turns               who runs next, and a rank that does not hand on
    clocks              the clock of each rank, by which limits of time count
    blocking_calls      waits of Python in which a rank hands on after a while
    rank_threads        which rank the calling thread is
    running_time        the clock that stands still while a debugger has stopped the ranks

    process_state       what each rank has for itself, such as torch's random stream: the registered
                        states, exchanged at a turn
    replaced_names      attributes of modules and classes, among these states
    python_stream       Python's random stream, the same
    numpy_stream        NumPy's, the same
    output_names        ``sys.stdout``, ``print`` and loggers, the same
    global_hooks        hooks on all modules and all optimizers, the same
    rank_modules        ``__main__`` and the modules of a program, the same
    rank_profiler       one ``torch.profiler`` for each rank
    process_messages    functions and classes of a rank's program in messages to processes
    kept_by_threads     what threads that a rank starts keep of it

    cached_properties   ``functools.cached_property`` without its lock, so that ranks arrive

    rank_breakpoints    where ``breakpoint()`` leads
    debugger_watch      stops the clock for debuggers that are not ours
    rank_states         what each rank does while a debugger has stopped them
    last_seen           the last known state of a rank, for reports
    exit_handlers       the end of a process in which ranks have left something
"""
