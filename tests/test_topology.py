"""Groups from degrees, against the report's figures, Megatron-Core's rank lists, and real process groups."""

import dataclasses
import subprocess
import sys
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from ep_plugin.drawing import topology_svg, topology_text
from ep_plugin.topology import KINDS, ProcessGroups, experts_of, layout, main


def lists(made, kind):
    return [list(ranks) for ranks in made.groups(kind)]


def degrees_of(world):
    """All possible (tp, cp, pp, etp, ep) of a world."""
    divisors = [d for d in range(1, world + 1) if world % d == 0]
    return [
        dict(tp=tp, cp=cp, pp=pp, etp=etp, ep=ep)
        for pp in divisors
        for tp in divisors
        for cp in divisors
        if world % (pp * tp * cp) == 0
        for etp in divisors
        for ep in divisors
        if world % (pp * etp * ep) == 0
    ]


FIGURES_11_AND_13 = {
    # M_E: (ep_mp groups, ep_dp groups, coordinates (EP_DP, EP_MP) by rank, experts by rank)
    1: (
        [[0], [1], [2], [3]],
        [[0, 1, 2, 3]],
        [(0, 0), (1, 0), (2, 0), (3, 0)],
        [range(0, 16)] * 4,
    ),
    2: (
        [[0, 1], [2, 3]],
        [[0, 2], [1, 3]],
        [(0, 0), (0, 1), (1, 0), (1, 1)],
        [range(0, 8), range(8, 16)] * 2,
    ),
    4: (
        [[0, 1, 2, 3]],
        [[0], [1], [2], [3]],
        [(0, 0), (0, 1), (0, 2), (0, 3)],
        [range(0, 4), range(4, 8), range(8, 12), range(12, 16)],
    ),
}


@pytest.mark.parametrize("ep", FIGURES_11_AND_13)
def test_the_reports_figures_11_and_13(ep):
    """Catches EP_MP and EP_DP exchanged, and experts dealt out in another order than contiguous blocks."""
    ep_mp, ep_dp, coordinates, experts = FIGURES_11_AND_13[ep]
    made = layout(4, ep=ep)
    assert (made.dp, made.ep_mp, made.ep_dp) == (4, ep, 4 // ep)
    assert lists(made, "ep_mp") == ep_mp
    assert lists(made, "ep_dp") == ep_dp
    assert lists(made, "dp") == lists(made, "dp_cp") == [[0, 1, 2, 3]]
    places = [made.coordinate(rank) for rank in range(4)]
    assert [(place["ep_dp"], place["ep_mp"]) for place in places] == coordinates
    assert [made.experts(rank, 16) for rank in range(4)] == experts


def test_context_parallel_ranks_fold_into_ep_groups():
    """Catches EP groups that are built inside the dp group alone (D·C = M_E·D_E, the folded form)."""
    made = layout(8, cp=2, ep=4)
    assert made.dp * made.cp == made.ep_mp * made.ep_dp == 8
    assert lists(made, "cp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert lists(made, "dp") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert lists(made, "ep_mp") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert lists(made, "ep_dp") == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_tensor_parallel_ranks_fold_into_ep_groups_of_their_stage():
    """Catches EP groups that cross pipeline stages or skip the ranks of a tensor-parallel group."""
    made = layout(16, tp=2, cp=2, pp=2, etp=1, ep=4)
    assert made.dp == 2
    assert lists(made, "ep_mp")[:2] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert lists(made, "ep_dp")[:4] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert lists(made, "pp")[0] == [0, 8]


def test_expert_tensor_parallel_is_inside_ep_mp():
    """Catches EP_MP made faster than ETP."""
    made = layout(8, tp=2, etp=2, ep=2)
    assert lists(made, "etp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert lists(made, "ep_mp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert lists(made, "ep_dp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert lists(made, "etp_ep") == [[0, 1, 2, 3], [4, 5, 6, 7]]


@given(
    st.sampled_from([1, 2, 6, 8, 12, 24]).flatmap(
        lambda world: st.tuples(st.just(world), st.sampled_from(degrees_of(world)))
    )
)
def test_every_layout_is_a_partition_and_conserves_ranks(case):
    """Catches ranks lost or counted twice, and two axes of one grid that share more than one rank."""
    world, degrees = case
    made = layout(world, **degrees)
    assert made.tp * made.cp * made.dp == made.etp * made.ep_mp * made.ep_dp == world // made.pp
    for kind in KINDS:
        groups = made.groups(kind)
        assert sorted(rank for ranks in groups for rank in ranks) == list(range(world))
        assert len({len(ranks) for ranks in groups}) == 1
        for ranks in groups:
            assert list(ranks) == sorted(ranks)
    for rank in range(world):
        assert set(made.group_of("ep_mp", rank)) & set(made.group_of("ep_dp", rank)) == {rank}
        stage = {
            made.coordinate(peer)["pp"] for kind in ("ep_mp", "ep_dp", "dp_cp") for peer in made.group_of(kind, rank)
        }
        assert stage == {made.coordinate(rank)["pp"]}
        position = made.group_of("ep_mp", rank).index(rank)
        assert position == made.coordinate(rank)["ep_mp"], "the rank inside the EP_MP group is the EP_MP coordinate"


@pytest.mark.slow
def test_rank_lists_equal_megatrons():
    """Catches an axis order that a Megatron trainer would not share."""
    parallel_state = pytest.importorskip("megatron.core.parallel_state")
    order = "tp-cp-ep-dp-pp"
    for world in (1, 2, 4, 6, 8, 12, 16):
        for degrees in degrees_of(world):
            made = layout(world, **degrees)
            dense = parallel_state.RankGenerator(tp=made.tp, ep=1, dp=made.dp, pp=made.pp, cp=made.cp, order=order)
            expert = parallel_state.RankGenerator(tp=made.etp, ep=made.ep, dp=made.ep_dp, pp=made.pp, cp=1, order=order)
            for token in ("tp", "cp", "dp", "pp"):
                assert lists(made, token) == dense.get_ranks(token), (degrees, token)
            assert lists(made, "dp_cp") == dense.get_ranks("dp-cp"), degrees
            assert lists(made, "tp_pp") == dense.get_ranks("tp-pp"), degrees
            for kind, token in (("etp", "tp"), ("ep_mp", "ep"), ("ep_dp", "dp"), ("pp", "pp")):
                assert lists(made, kind) == expert.get_ranks(token), (degrees, kind)
            assert lists(made, "etp_ep") == expert.get_ranks("tp-ep"), degrees
            assert lists(made, "etp_ep_pp") == expert.get_ranks("tp-ep-pp"), degrees


@pytest.mark.parametrize(
    ("world", "degrees", "message"),
    [
        (6, dict(ep=4), r"etp·ep·pp = 1·4·1 = 4 does not divide world_size=6; .*ep may be 1, 2, 3, 6;"),
        (8, dict(ep=16), r"= 16 does not divide world_size=8; .*ep may be 1, 2, 4, 8;"),
        (8, dict(tp=3, ep=2), r"tp·cp·pp = 3·1·1 = 3 does not divide world_size=8; .*tp may be 1, 2, 4, 8;"),
        (8, dict(pp=2, ep=8), r"= 16 does not divide world_size=8; .*ep may be 1, 2, 4, or pp may be 1;"),
        (8, dict(tp=4, pp=3, ep=4), r"= 12 does not divide world_size=8; .*pp may be 1, 2;"),
        (8, dict(tp=3, ep=3), r"no change of one degree would do; each product must be one of 1, 2, 4, 8"),
        (8, dict(ep=0), r"ep=0 must be an integer of at least 1"),
        (0, dict(), r"world_size=0 must be an integer of at least 1"),
        (8, dict(cp=2.0), r"cp=2\.0 must be an integer"),
    ],
)
def test_impossible_degrees_quote_values_and_what_would_work(world, degrees, message):
    """Catches a division that silently rounds down, and advice that would fail in turn."""
    with pytest.raises(ValueError, match=message):
        layout(world, **degrees)


@pytest.mark.parametrize(("num_experts", "ep", "works"), [(6, 4, "1, 2, 3, 6"), (7, 2, "1, 7"), (0, 2, "nothing")])
def test_experts_that_do_not_divide_are_an_error(num_experts, ep, works):
    """Catches the last rank getting fewer experts, or none."""
    with pytest.raises(ValueError, match=f"num_experts={num_experts} .* ep={ep} ranks; ep may be {works}$"):
        experts_of(num_experts, ep, 0)


def test_a_rank_outside_is_an_error():
    """Catches coordinates of a rank that does not exist."""
    for call in (lambda: layout(4).coordinate(4), lambda: layout(4).group_of("dp", -1), lambda: experts_of(4, 2, 2)):
        with pytest.raises(ValueError, match="is not in"):
            call()
    with pytest.raises(ValueError, match="'ep' is not one of tp, cp"):
        layout(4).groups("ep")


def test_the_command_prints_groups_and_experts(capsys):
    """Catches a table whose rows do not belong to their ranks."""
    main(["--world", "8", "--ep", "4", "--cp", "2", "--experts", "16"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "8 ranks = PP 1 × (TP 1 · CP 2 · DP 4) = PP 1 × (ETP 1 · EP_MP 4 · EP_DP 2)"
    header = lines[2].split()
    row = next(line.split() for line in lines if line.startswith("5 "))
    assert dict(zip(header, row, strict=True)) == {
        **{"rank": "5", "tp": "0", "cp": "1", "dp": "2", "etp": "0", "ep_mp": "1", "ep_dp": "1", "pp": "0"},
        "experts": "4-7",
    }
    assert any(line.split() == "ep_dp 2 reduces expert gradients [0,4] [1,5] [2,6] [3,7]".split() for line in lines)


def test_a_long_table_says_what_it_leaves_out():
    """Catches a table of thousands of lines printed at every start, or one cut without a word."""
    text = layout(256, ep=2).table(limit=4)
    assert "… 252 more ranks" in text and "… 124 more groups" in text and len(text.splitlines()) < 25


def test_the_command_ends_an_impossible_layout_with_one_line(capsys):
    """Catches a traceback shown to a person, and exit code 0."""
    with pytest.raises(SystemExit) as end:
        main(["--world", "8", "--ep", "4", "--experts", "6"])
    assert end.value.code == 2
    assert capsys.readouterr().err == (
        "ep-topology: num_experts=6 cannot be spread evenly over ep=4 ranks; ep may be 1, 2, 3, 6\n"
    )


def test_the_arithmetic_needs_no_torch():
    """Catches an import of torch that makes the table slow and unusable on a login node."""
    code = "import sys, ep_plugin.topology as t; t.layout(8, ep=4).table(16); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_process_groups_have_a_field_for_every_kind():
    """Catches a kind added to the table and not to the groups."""
    assert {field.name for field in dataclasses.fields(ProcessGroups)} == {"layout", "rank", *KINDS}


def reduced_ranks(rank, world, degrees):
    """Per kind: the ranks whose bits the group's all-reduce brought together, and the place in the group."""
    groups = ProcessGroups.create(layout(world, **degrees))
    found = {}
    for kind in KINDS:
        bits = torch.tensor(1 << rank)
        group = getattr(groups, kind)
        dist.all_reduce(bits, group=group)
        found[kind] = ([peer for peer in range(world) if bits >> peer & 1], dist.get_rank(group))
    distinct = len({id(getattr(groups, kind)) for kind in KINDS if dist.get_world_size(getattr(groups, kind)) > 1})
    groups.destroy()
    dist.barrier()
    return found, distinct


@pytest.mark.parametrize(
    ("world", "degrees"),
    [(4, dict(ep=2)), (4, dict(ep=4)), (8, dict(tp=2, cp=2, etp=2, ep=2)), (8, dict(tp=2, pp=2, ep=4))],
)
def test_each_group_reduces_over_its_ranks(pool, world, degrees):
    """Catches groups of the wrong kind, made in different orders on different ranks, or shared by two kinds."""
    made = layout(world, **degrees)
    wide = sum(len(made.groups(kind)) < world for kind in KINDS)
    for rank, (found, distinct) in enumerate(pool.run(reduced_ranks, world, degrees)):
        for kind, (ranks, place) in found.items():
            assert ranks == list(made.group_of(kind, rank)), (kind, rank)
            assert place == ranks.index(rank), (kind, rank)
        assert distinct == wide


def test_groups_before_init_process_group_are_refused():
    """Catches torch's own error, which says nothing of torchrun."""
    with pytest.raises(ValueError, match=r"needs torch\.distributed: start the program with torchrun"):
        ProcessGroups.create(layout(2, ep=2))


def create_for_another_world(rank, world):
    before = len(dist.distributed_c10d._world.pg_map)
    with pytest.raises(ValueError, match="layout is for world_size=4, but 2 processes are running"):
        ProcessGroups.create(layout(4, ep=2))
    return len(dist.distributed_c10d._world.pg_map) - before


def test_another_world_size_is_refused_before_any_group_is_made(pool):
    """Catches a mismatch found half way, which leaves the other ranks waiting."""
    assert pool.run(create_for_another_world, 2) == [0, 0]


@pytest.mark.parametrize("degrees", [dict(ep=4), dict(tp=2, cp=2, ep=4), dict(tp=2, etp=2, ep=2), dict(pp=2, ep=2)])
def test_pictures_show_every_rank_and_its_group(degrees):
    """Fault: a picture of another layout than the table: a rank left out, or in a group that it is not in."""
    chosen = layout(8, **degrees)
    text = topology_text(chosen, 8)
    drawn = [line.split("|")[1].split() for line in text.splitlines() if "|" in line]
    rows = len(drawn) // chosen.pp
    names = [line.split("|")[0].strip() for line in text.splitlines() if "|" in line][:rows]
    columns = [
        dict(zip(names, cells, strict=True))
        for stage in range(chosen.pp)
        for cells in zip(*drawn[stage * rows : (stage + 1) * rows], strict=True)
    ]
    assert [int(column["rank"]) for column in columns] == list(range(8))
    for a in columns:
        for b in columns:
            same_stage = chosen.coordinate(int(a["rank"]))["pp"] == chosen.coordinate(int(b["rank"]))["pp"]
            together = int(b["rank"]) in chosen.group_of("ep_mp", int(a["rank"]))
            assert together == (same_stage and a["EP_MP group"][0] == b["EP_MP group"][0])
    shapes = ElementTree.fromstring(topology_svg(chosen, 8))
    said = [element.text for element in shapes.iter("{http://www.w3.org/2000/svg}text")]
    assert [said.count(str(rank)) for rank in range(8)] == [2] * 8


def test_the_command_draws(tmp_path, capsys):
    """Fault: an option that draws nothing; a world too large for a picture ends with a traceback."""
    file = tmp_path / "layout.svg"
    main(["--world", "8", "--ep", "4", "--draw", "--svg", str(file)])
    assert "A0" in capsys.readouterr().out and file.read_text().startswith("<svg")
    with pytest.raises(SystemExit) as caught:
        main(["--world", "256", "--ep", "4", "--svg", str(file)])
    assert caught.value.code == 2 and "256 ranks does not fit a picture" in capsys.readouterr().err
