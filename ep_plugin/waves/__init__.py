"""Wave schedules: a batch in parts, so that rows move while experts compute (report, section 5.9).

split.py        which tokens and routes, or which experts, each wave has; where its rows lie among all rows
dispatchers.py  the dispatchers, with one lease for all waves of a batch
lanes.py        streams and events: what may run beside what
experts.py      the expert MLP of one wave, forward and backward
node.py         the autograd node of a step with plain rows
mxfp8.py        the autograd node of a step with MXFP8 rows
step.py         the step itself, and the dispatcher that a wave schedule builds
tuned.py        tables of tuning runs, from which ``schedule.kind='auto'`` chooses
"""

from .step import WaveDispatcher, build_waves, wave_moe_step
from .tuned import choose, resolve

__all__ = ["WaveDispatcher", "build_waves", "choose", "resolve", "wave_moe_step"]
