"""What every wrapper of a module needs: names, parameters, hooks and gradients of ``nn.Module``.

``compiled``           the names of the plain model, also of modules that were compiled
``wrapper``            the base of wrappers, which keep the names of the plain module
``memory_overlap``     parameters that share memory without being one parameter
``parameters``         ignored parameters, which wrapper reduces a parameter, what may change
``model_agreement``    checks that all ranks hold the same model, which can be replicated
``nested``             the tensors inside of what a module takes and returns
``autograd``           what the engine does now, and adding to ``.grad``
``deferred_hooks``     hooks of users on gradients, called when these are reduced
``norms``              the norm of gradients of which each rank may have parts
``sharded_gradients``  gradients that know that they are shards, so that norms are right
``optimizer_hooks``    checks before each step of an optimizer
``optimizer_trial``    whether an optimizer that sees parts trains the same model
``partial_steps``      steps over parts, which are refused if they need more
"""
