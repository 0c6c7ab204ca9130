"""Which plan fits and which is fastest, on a cluster that is not here, and why.

In reading order::

    device           a processor with memory: its rates, as data with their sources
    cluster          hosts of devices, their memory, and the links inside of and between them
    transformer      the sizes of a decoder, which parameters and operations follow from
    schedule_cost    what is known of a schedule before its actions are made
    layout           how ranks share the model: the degree of each axis, and what is sharded
    software_stack   the constants of the software that trains, as data that a script has fitted
    operations       what one block computes and moves for one microbatch
    compute_time     how long a device takes for that
    collective_time  how long collectives take inside of and between hosts
    stage_schedule   what a schedule costs in closed form: its bubble, and what a rank keeps
    stage_time       how long one microbatch takes in each stage of a pipeline, by that of a block
    step_time        the time of a step as a sum of named terms, and a lower bound
    step_memory      what a rank keeps at the peak of a step, by category
    layout_space     all layouts of a cluster, in families that compute the same
    memory_table     the peaks of a family
    simulated_step   the time of a step with the pipeline simulated on its action lists
    plan_search      the layouts that fit, and the fastest
    plan_options     a layout as the options of an ec.Plan
    refusal          a plan that does not fit: the rank, the moment and the bytes
    survey           what is smallest, what does not fit, and what is worth a choice
    goals            what is best
    priced_plan      a plan that fits, with all that is said about it
    ranked_plans     the plans of a cluster from the best on
    what_if          the best plan of each size of a cluster, and what failures cost
    model_file       a model's sizes from a file
    described_model  a model's sizes from what a user has
    api              ec.plan
    plan_timeline    the pipeline of a plan, simulated, and the memory of its fullest rank
    plan_views       what a notebook says about plans
    plan_page        a page about plans

A plan whose memory must be exact is run without its values, one rank of each stage::

    shapes_only      operations on large tensors compute only shapes
    dry_run          a step of a plan with all its allocations
    script_check     the same of a script, of which the first steps are run

Any model, and the machine at hand, are described by what they do::

    traced_model       what the blocks of a model compute, move and keep
    operation_counter  counts that, operation by operation
    model_tracing      a step of any model, counted
    rank_rates         how fast ranks compute and communicate, measured
    measured_cluster   the machine at hand as a cluster

All but these do without torch: a plan for 10,000 devices is found on a laptop.
"""

import echelon.planner.plan_views  # noqa: F401  # gives Plans their view
