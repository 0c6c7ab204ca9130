"""Schedules as data: which rank does what in which order; nothing here needs torch.

``ir``            actions, schedules and their text form
``looped``        schedules with stages in a loop: GPipe, 1F1B, interleaved, zero bubble
``vshaped``       schedules with stages on a V: ZB-V, DualPipeV
``controllable``  V-Half and V-Min, which trade time for memory
``families``      schedules by name
``dataflow``      who needs what: the values, and what makes, moves and needs each of them
``walk``          the one walk through a schedule: who can go on, and who never can
``check``         the rules that a schedule must keep
``costs``         what computations cost
``simulate``      how long a schedule takes, and timelines
``choose``        the best schedule for a size
``passes``        from computations to transfers, unshards and reductions
``render``        timelines as text, SVG and HTML
``schedule_views``  what ``ec.show`` says about schedules, simulations, timelines and choices
``action_lists``  the actions of ranks in text that anybody wrote, and what is misplaced in them
``action_file``   the text of a file that may be anything
``waits``         who waits for whom in a circle, under a rule of sends and receives
``judgement``     all of this in one: ``judge``, whose verdict draws a circle as text
"""
