"""What a training loop needs around the model.

``sample_order``   the order of the samples of an epoch, for any number of ranks
``sampling``       which samples a rank reads next, and how far the job is
``shares``         the division of a batch among ranks
``sample_stream``  the batches of a rank from a source that is read in order
``source_cursor``  the position in one source, and how to get there again
``mixture``        one source of several, in given proportions
``packing``        documents of tokens in sequences of one length
``worker_seed``    the seed that a loader draws for its workers
``gathering``      the values of all samples of a batch, in the order of the data
``gathered_rows``  the rows of all ranks in one tensor, through which gradients flow back
``shared_data``    a data set that one rank of each host builds
``mapped_values``  nested values whose arrays lie in one memory
``scaling``        loss scaling for float16, with the same scale on all ranks
``gradient_norm``  the norm of all gradients of a model, and clipping by it
``ema``            the exponential moving average of a model that is trained by any technique
``finite``         the check that no loss and no gradient has NaN or Inf
``stopping``       signals that end all ranks after the same step
"""
