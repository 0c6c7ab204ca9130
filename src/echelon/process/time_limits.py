"""How long the processes and threads of a job wait for one another where no user says it.

They stand here, in seconds, and are read at each use (``time_limits.NOTICE_S``), so that a test can
replace one of them. Three kinds do not: the timeout of a call (``timeout`` of ``run`` and ``init``,
``DEFAULT_TIMEOUT_S``); pauses between two looks at something; and the grace of one mechanism, which
stands beside it, as ``GRACE_S`` of ``comm.threads.blocking_calls``, after which others run.

::

    a rank fails ── LAST_WORDS_S ──► those that torchrun ends have said in which call they were
                 ── NOTICE_S ──────► those of run() have noticed, or are ended
                 ── END_S ─────────► those of echelon run have ended in good order, or are killed
"""

from __future__ import annotations

# After a failure -------------------------------------------------------------------------------

# What the other ranks of ``run`` get to notice that one has failed. Processes are killed then, so
# that a longer limit would only delay the error. Threads cannot be, and share one interpreter: what
# is left of them computes on beside the caller.
NOTICE_S = 1.0
NOTICE_IN_THREADS_S = 2.0
# How long a rank lives on after its first SIGTERM: enough to see that a peer is gone, wherever it
# was. torchrun and the agent wait longer before they kill.
LAST_WORDS_S = 1.5
END_S = 5.0  # what ranks of ``echelon run`` get to end in good order when another one has failed
KILL_S = 5.0  # what the kernel gets to end a killed process
# What a rank that has closed its pipe gets to end: a driver may take seconds to free a device.
EXIT_S = 30.0
TELL_S = 5.0  # what a rank that ends itself gets to tell the others why
FLUSH_S = 1.0  # what standard output gets to take what was printed, in a process that ends itself

# How long a rank in trouble waits for the records of others before it says what it knows itself.
# A rank that timed out has lost its connections before it could write why. Where the flight
# recorder says that it lives it will write, if late: its host may be busy.
READ_RECORDS_S = 1.0
READ_RECORD_OF_LOST_S = 2.0
READ_RECORD_OF_LIVING_S = 10.0
STORE_S = 2.0  # a store behind a cut link never answers: a call to it is given up after this time
STACK_ANSWER_S = 1.0  # what a process gets to write its stack; it may have to wait for a core
STORE_CALL_S = 120.0  # what an object store gets for one call of a save or a load

# How long simulated ranks wait for the turn of others, which another thread of the process has
# started: a turn may compile a model.
OTHER_WORLD_S = 3600.0

# How often a rank looks whether its device has finished its calls, and whether others ask for what
# it has issued. NCCL's own watchdog, which ends the process, comes so much later than the timeout.
LOOK_FOR_STALLS_S = 2.0
WATCHDOG_S = 60.0

# On request ------------------------------------------------------------------------------------

SAVE_S = 5.0  # what ranks get after a stop signal to save and leave, unless --grace says more
HURRY_S = 2.0  # what they get when they are asked a second time
# One press of Ctrl-C may arrive twice, where a launcher sends it to every process of a job.
SAME_PRESS_S = 0.5

# At the end ------------------------------------------------------------------------------------

# What the rank that holds the store gives the others to close their worlds, so that they can still
# read records; so closing a world may take so much longer than a call.
CLOSE_WORLD_S = 10.0
CLOSE_FAILED_WORLD_S = 3.0
PRUNE_S = 30.0  # what a black box gets to remove old stretches; the next run removes the rest
# What a rank that is late gets beyond its timeout to say so itself, before the agent does. It looks
# every 2 s, and its stack takes another one.
SAY_SO_S = 4.0
# What threads and exit handlers that simulated ranks leave behind get beyond the timeout. Nobody
# else speaks for them, and nobody waits, so there is no hurry.
LEFT_BEHIND_S = 5.0
END_THREADS_S = 2.0  # what background threads get at the end of the interpreter to end
END_TOLD_THREADS_S = 1.0  # and once they have been told to
