"""What every wrapper of a module needs: names, parameters, hooks and gradients of ``nn.Module``.

``compiled``           the plain model's names, also of modules that ``torch.compile`` has wrapped
``wrapper``            the module around a module, which looks like the plain one
``parameters``         which ones are left out, which wrapper reduces them, what may change
``model_agreement``    whether all ranks hold the same model, and one that can be replicated
``nested``             the tensors inside of what a module takes and returns
``autograd``           what the engine does now, and adding to ``.grad``
``deferred_hooks``     hooks of users on gradients, called when these are reduced
``norms``              the norm of gradients of which each rank may have parts
``sharded_gradients``  gradients that know that they are shards, whoever asks for their norm
``optimizer_hooks``    checks before each step of an optimizer
``elementwise``        optimizers that need more than what one rank has
"""
