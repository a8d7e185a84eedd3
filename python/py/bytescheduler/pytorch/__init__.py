"""Torch, with Horovod's names: :mod:`bytescheduler.pytorch.horovod`."""
