"""Expert parallelism for an existing MoE trainer: choose a dispatcher, a precision and a schedule; keep the model.

The parts are imported from their own modules (``ep_plugin.topology``, ``ep_plugin.routing``, …), so that importing the
package alone costs nothing and needs neither torch nor a GPU.
"""

__version__ = "0.1.0"
