"""MXNet, with its key-value stores: :mod:`bytescheduler.mxnet.kvstore`."""
