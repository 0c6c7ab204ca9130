"""The stateful loader of ``torchdata`` as a source."""
