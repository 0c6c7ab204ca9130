"""What a process of a job is and does: its environment, children, threads and end.

``environment``         the job of this process, from the variables of its launcher
``operating_system``    what not every operating system has
``time_limits``         how long processes and threads wait for one another
``process_status``      what ``/proc`` shows of other processes
``atomic_files``        files and folders of users, replaced whole and at one instant
``plain_file``          ordinary files where others may have put something else
``file_lock``           locks on open files, which end with the process that holds them
``command_words``       command lines without the secrets in them
``memory_files``        memory that processes of one user open through ``/proc``
``die_with_parent``     processes that the kernel ends with the one that started them
``forks``               a process that a rank forks owns nothing of the rank's world
``fork_server``         the process that local ranks are forked from
``process_end``         the exit code of a process, and what it has printed
``lossy_streams``       standard streams that lose text where their file cannot take it
``background_threads``  threads beside the one that runs the script
``thread_frames``       where the threads of this process are now
``main_thread``         what only the main thread may do, done for ranks that are other threads
``this_rank``           which rank the calling thread is, and what it has as one
``replacement``         a function of Python or torch that is replaced for a while
``offered_debugger``    the debugger of simulated ranks, for code below the package that has it
``notebook``            whether this process is the kernel of a notebook, and names of cells
``listeners``           the addresses on which this process listens
"""
