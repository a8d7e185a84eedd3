"""Models that average their own gradients."""

from byteps.torch.parallel.distributed import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
