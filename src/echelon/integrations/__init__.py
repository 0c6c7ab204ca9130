"""Guests of other libraries: what lets their trainers use groups, wrappers and checkpoints of ours.

Nothing in this library imports a host, or this package: a user who wants one imports its guest.

``sharing``       how a guest shares a model among the ranks
``lightning``     strategies for the Trainer and for Fabric
``accelerate``    ``EchelonAccelerator``
``transformers``  ``EchelonTrainer``
``ray``           groups in the workers of Ray Train, and checkpoints that it knows
"""
