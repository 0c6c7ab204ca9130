"""What a training loop needs around the model.

``sample_order``   the order of the samples of an epoch, for any number of ranks
``sampling``       which samples a rank reads next, and how far the job is
``scaling``        loss scaling for float16, alike on all ranks
``gradient_norm``  the norm of all gradients of a model, and clipping by it
``finite``         whether a step may be taken: not if a loss or gradient has NaN or Inf
``stopping``       signals that all ranks follow at the same step
"""
