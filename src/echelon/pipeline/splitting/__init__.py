"""How a model is cut: into blocks, of which consecutive ones become a stage.

``split``         the call: blocks, costs, partition, stages
``submodule``     what blocks and stages are
``partition``     which blocks go to which stage
``block_costs``   what a block costs: parameters, operations, bytes, seconds
``blocks``        models with a ``ModuleList``: every stage runs the model's own forward
``fake_tensors``  the values that a stage does not have
``huggingface``   causal language models of ``transformers``
"""
