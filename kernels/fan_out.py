"""From unique token rows on the expert rank to rows in expert order (the local half of the dedup form).

Legend: S = M·T_max stage rows (stripe source·T_max + t), K routes per token, R expert rows, D row width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def row_routes_torch(local_rows: Tensor, tokens: Tensor, num_rows: int) -> Tensor:
    """The route that fills each expert row: int64 [R], (source·T_max + t)·K + k.

    ``local_rows`` int32 [M, T_max, K], −1 where the route goes elsewhere; entries of tokens t >= ``tokens[source]``
    (int64 [M]) are not read as routes, whatever they hold."""
    _, t_max, k = local_rows.shape
    valid = (local_rows >= 0) & (torch.arange(t_max, device=tokens.device) < tokens[:, None])[:, :, None]
    routes = valid.flatten().nonzero().squeeze(1)
    out = torch.full((num_rows,), -1, dtype=torch.int64, device=local_rows.device)
    out[local_rows.flatten()[routes].long()] = routes
    return out


def fan_out_torch(
    stage: Tensor, route_of_row: Tensor, top_k: int, scale: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """``out[i] = stage[route_of_row[i] // K] (* scale[i])``: [R, D] rows in expert order.

    ``stage`` [S, D]; ``scale`` [R], in whose dtype the product is taken before it is rounded to the rows' dtype.
    """
    token = route_of_row.div(top_k, rounding_mode="floor")
    if scale is None:
        if out is None:
            return stage.index_select(0, token)
        return torch.index_select(stage, 0, token, out=out)
    rows = (stage.index_select(0, token).to(scale.dtype) * scale.unsqueeze(1)).to(stage.dtype)
    if out is None:
        return rows
    return out.copy_(rows)
