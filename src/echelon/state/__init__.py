"""What a rank holds of the model and its optimizer, by the names of the plain model.

::

    tensor_shard     a range of one tensor, in the memory of one rank
    sharded_state    all ranges of a model, and the base class of modules that describe theirs
    model_state      copies of the state of a model, and loading it in place
    state_copy       tensors of such copies, into which a write would be lost and is refused
    optimizer_state  the state of an optimizer by name: gathered from ranges, and loaded into them
    initialization   initial values of tensors on the meta device
"""
