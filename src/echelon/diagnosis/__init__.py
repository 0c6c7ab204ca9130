"""What each rank is doing, who waits for whom, and which failure was the first.

``collective_call``  an issued call, the line of the user that issued it, and its eight bytes, which
                     ranks compare
``flight_recorder``  where each rank of a host is, in memory that outlives it
``stacks``           the Python stacks of ranks that do not answer
``rank_monitor``     what a rank writes about itself into the recorder, and which rank a time-out
                     blames
``stuck_ranks``      how an error describes the ranks that it blames
``stalled_calls``    which ranks hold up a collective that a device does not finish
``arrivals``         when a rank came to its last collectives, and what it had done before
``activity_hooks``   where torch and Python begin what this library does not see otherwise
``rank_time``        what a rank spends its time on, which it measures itself
``step_rows``        that for each step, in memory that others can read
``held_up``          which rank holds up the others, by how much, and in what
``failure_record``   why one rank stopped, as plain data
``root_cause``       which of several records is the first cause
``failure_report``   the lines for a person, the first of which names the cause
``exit_guard``       the end of a rank's process: its record, and the end in time
"""
