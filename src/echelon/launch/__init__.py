"""Start ranks, pass their endings on, and restart them.

``run``              ``ec.run`` and ``ec.init``
``rank_function``    the function of a user, with or without a world
``processes``        local processes as ranks of ``run``
``function_pickle``  the function of ``run`` on its way to processes, and its result on its way back
``rank_program``     what Python starts for a rank of ``echelon run``: it becomes the user's program
``served_program``   the user's program, whose groups of torch echelon serves
``program``          what ``echelon run`` is to run, and the command that does it
``local_job``        processes of ``echelon run``, from the first to the exit code
``agent``            torch's agent for the ranks of one host
``loopback_rendezvous``  the rendezvous of that agent, which no other host can reach
``attempt``          how the ranks of one attempt ended, and the lines that say so
``rank_output``      the folder and the screen for what ranks print
``written_rows``     rows that a progress bar writes over, and which state of them is shown
``rank_lines``       whole lines of simulated ranks, each with its rank
``cell_output``      what ranks print while a cell of a notebook runs
``simulated_job``    simulated ranks of ``echelon run``
``simulated_ranks``  simulated ranks as threads: start them, follow them to their end
``rank_ends``        how they have ended: the facts that an agent of processes has
"""
