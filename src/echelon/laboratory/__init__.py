"""Run, compare, replay and look at a distributed program in one process.

Comparing with one process, ``ec.compare``:

``batch_rows``        what a batch is, and how a model is called with it
``pieces``            which ranges of the plain model the tensors of a rank are
``value_recorder``    hooks that record outputs, gradients, buffers and states of a training
``one_process``       the training that is right: each step on the whole batch
``rank_training``     what runs on a rank: a function of the user, or what a plan asks for
``seen_rows``         which rows of the batches, and which random stream, each forward had
``value_pairs``       values of a rank beside those of one process
``differences``       the first ones that differ by more than rounding
``causes``            what a cause is known by, and what it is called; pure functions
``gradient_causes``   the same of gradients; pure functions
``evidence``          what one process would compute for one cause or another
``explain``           asks for the evidence that a difference needs, and for its cause
``comparison``        the result, as text and HTML
``verdict``           from two trainings to the result
``compare``           ``ec.compare`` itself: trains twice, and compares

Tests on many ranks, with pytest:

``pytest_plugin``     what pytest calls: marks, options, the fixture ``world``
``rank_cases``        what the marks of a test ask for
``rank_test``         runs the body of a test on all ranks
``rank_values``       what each simulated rank gets of the values of fixtures
``rank_streams``      what each simulated rank prints and logs
``rank_outcomes``     how each rank ended, and how a report shows it
``pytest_debugger``   the debugger of ranks under pytest, also where a rank has failed
``process_rank``      one rank in a process of its own, which runs pytest
``process_test``      sends a test to such ranks, and collects what they leave

Stopping ranks, ``breakpoint()`` and ``world.breakpoint()``:

``rank_frames``     frames of ranks as a user knows them, and the table of all ranks
``rank_commands``   what the debugger has beside the commands of pdb
``shared_breakpoints``  breakpoints of ``b``, which stop every rank
``debugger_host``   where the debugger speaks with its user: a terminal, a cell, pytest
``debugger_input``  the lines that a user types, which the main thread reads
``debugger``        pdb in a rank, while no other rank and no limit of time runs

Computing a step again, ``ec.Blackbox`` and ``echelon replay``:

``kept_values``       batches as bytes that run no code, with the strides of tensors
``step_log``          the file of a rank, to which each step is appended
``box_folder``        the folder of a box: attempts, stretches of steps, and which of them may go
``job_facts``         what has run, and what its bits depend on
``box_recording``     what a box does in a run
``kept_run``          which steps of a run can be replayed, and from which checkpoint
``rank_replay``       what a box does in a replay
``blackbox``          ``ec.Blackbox`` itself
``replayed_program``  the script or the function of the run, to be called again
``replay``            ``ec.replay``: runs the ranks, and says what was as in the run

Looking at objects:

``show``         ``ec.show``: an object in a notebook or a terminal
``allocations``  the bytes of tensors that are alive after each operation
``step_record``  what a rank sends in a block, and the memory of its tensors over it

Holding ranks after each call, ``ec.step_through``:

``tensor_glance``  what is kept of tensors, how it reads, and which elements have changed
``data_moves``     which ranks get values of which others in a call
``stepped_call``   a call with what each rank gave and got, as text and HTML
``step_commands``  what a user types between two calls
``step_gate``      looks at each call, and holds the ranks
``step_through``   ``ec.step_through`` itself: lets them on, call by call

Races on GPUs, ``echelon race``, are found by ``echelon.testing.device``.
"""
