"""What a training loop needs around the model.

``sample_order``   the order of the samples of an epoch, for any number of ranks
``sampling``       which samples a rank reads next, and how far the job is
``scaling``        loss scaling for float16, with the same scale on all ranks
``gradient_norm``  the norm of all gradients of a model, and clipping by it
``finite``         the check that no loss and no gradient has NaN or Inf
``stopping``       signals that end all ranks after the same step
"""
