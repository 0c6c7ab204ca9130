"""Checkpoints in the forms of other tools, and back.

``convert``      from one format to another; what was written is read again and compared
``plain_files``  weights in safetensors
``torch_files``  ``torch.save`` and DCP
``step_files``   echelon's own steps
"""
