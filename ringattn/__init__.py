"""ringattn: exact attention and training on sequences sharded round a ring of processes.

The public API. Importing it needs neither a GPU nor Triton.
"""

from ringattn.kernels.flash import flash_attention
from ringattn.kernels.merge import merge
from ringattn.planner import plan
from ringattn.ring.attention import ring_attention
from ringattn.ring.layout import Layout
from ringattn.ring.ring import Ring
from ringattn.ring.schedule import Schedule, make_schedule

__version__ = "0.1.0"
__all__ = ["Layout", "Ring", "Schedule", "flash_attention", "make_schedule", "merge", "plan", "ring_attention"]
