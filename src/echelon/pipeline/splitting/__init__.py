"""Cuts a model into blocks, of which consecutive ones become a stage.

``split``         the public call: blocks, costs, partition, stages
``submodule``     blocks and stages
``partition``     the exact optimum of which blocks go to which stage
``block_costs``   parameters, operations, bytes or seconds of a block
``module_list``   models with a ``ModuleList``, whose own forward every stage runs
``absent_blocks`` stand-ins for the blocks that other stages have
``fake_tensors``  tensors whose values a stage does not have
"""
