"""What every wrapper of a module needs: names, parameters, hooks and gradients of ``nn.Module``.

``compiled``           the names of the plain model, also of modules that were compiled
``wrapper``            the base of wrappers, which keep the names of the plain module
``memory_writes``      what operators of torch write into
``memory_overlap``     parameters that share memory without being one parameter
``held_memory``        whether somebody else refers to memory that a wrapper is about to write over
``parameters``         ignored parameters, which wrapper reduces a parameter, what may change
``model_agreement``    checks that all ranks hold the same model, which can be replicated
``data_watch``         whether ranks train on the same rows, or have different numbers of batches
``replica_check``      whether what several ranks keep equal is still equal
``nested``             the tensors inside of what a module takes and returns
``autograd``           what the engine does now, and adding to ``.grad``
``deferred_hooks``     hooks of users on gradients, called when these are reduced
``norms``              the norm of gradients of which each rank may have parts
``sharded_tensor``     parameters and gradients that say that they are this rank's part, and of what
``sharded_arithmetic`` elementwise functions of parts
``sharded_views``      copies and views of parts, and what is given to ``.data``
``sharded_reductions`` sums, means and comparisons of parts, which are those of the whole
``sharded_norms``      norms of parts, and of the gradients of stages
``stage_gradients``    gradients of the stages of one rank of a pipeline, and numbers of them
``sharded_joins``      parts end to end, as in a vector of all parameters
``kept_gradients``     what may be done with gradients that are not reduced yet
``sharded_rules``      the table of what functions of torch do with parts
``optimizer_hooks``    checks before each step of an optimizer
``plain_steps``        parts are plain tensors in steps of optimizers
``optimizer_memory``   what an optimizer keeps, and whether parts of a model keep parts of it
``optimizer_trial``    whether an optimizer that sees parts trains the same model
``partial_steps``      steps over parts, which are refused if they need more
"""
