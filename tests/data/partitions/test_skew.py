# ruff: noqa: NPY002 - these tests are about the global generator
import inspect
import warnings

import numpy as np
import pytest

from lightning_fedstop.data import DirichletSkew, Iid, PathologicalSkew, QuantitySkew, Skew
from tests.oracles import read_oracles

DERMA = [228, 359, 769, 80, 779, 4693, 99]
BLOOD = [852, 2181, 1085, 2026, 849, 993, 2330, 1643]


def labels_of(class_sizes, seed=0):
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(len(class_sizes)), class_sizes))


def counts_of(clients, labels):
    return np.array([np.bincount(labels[client], minlength=labels.max() + 1) for client in clients])


def assert_each_sample_once(clients, n):
    assert all(client.dtype == np.int64 for client in clients)
    np.testing.assert_array_equal(np.sort(np.concatenate(clients)), np.arange(n))


PAPER = [
    Iid(),
    Iid(variant="released_code"),
    DirichletSkew(0.1),
    DirichletSkew(1e-3),
    DirichletSkew(1e-6),
    DirichletSkew(1e-308),
    DirichletSkew(1e9),
    DirichletSkew(0.1, min_samples=10),
    DirichletSkew(0.01, balance=True),
    PathologicalSkew(1),
    PathologicalSkew(2),
    PathologicalSkew(7),
    PathologicalSkew(2, min_samples=40),
    QuantitySkew(0.1),
    QuantitySkew(1e-6),
    QuantitySkew(0.1, min_samples=20),
]


@pytest.mark.parametrize("skew", PAPER, ids=repr)
@pytest.mark.parametrize("seed", [0, 7, 2**40])
@pytest.mark.filterwarnings("ignore:The training set has too few samples")
def test_every_sample_once_and_the_minimum_kept(skew, seed):
    labels = labels_of(DERMA)
    clients = skew.partition(labels, 100, seed)
    assert len(clients) == 100
    assert_each_sample_once(clients, len(labels))
    assert min(map(len, clients)) >= skew.min_samples


@pytest.mark.parametrize("skew", PAPER, ids=repr)
def test_depends_on_labels_number_of_clients_and_seed_only(skew):
    labels = labels_of(DERMA)
    np.random.seed(1)
    first = skew.partition(labels, 30, 3)
    np.random.seed(2)
    again = skew.partition(labels[:, None].astype(np.uint8), 30, 3)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    if skew.min_samples < 40:
        other = skew.partition(labels, 30, 4)
        assert any(not np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_the_callers_global_generator_and_labels_are_left_alone():
    labels = labels_of(DERMA)
    kept = labels.copy()
    np.random.seed(5)
    expected = np.random.random()
    np.random.seed(5)
    for skew in (*PAPER, DirichletSkew(variant="released_code"), PathologicalSkew(variant="released_code")):
        skew.partition(labels, 10, 0)
    assert np.random.random() == expected
    np.testing.assert_array_equal(labels, kept)


def test_quantity_replays_the_authors_draw():
    for case in read_oracles("partition_quantity_authors"):
        for skew in (QuantitySkew(case["c"]), QuantitySkew(case["c"], variant="released_code")):
            sizes = np.array(list(map(len, skew.partition(np.zeros(case["n"], int), 100, case["seed"]))))
            assert sizes[:10].tolist() == case["sizes_first10"]
            assert (sizes.max(), sizes.sum()) == (case["max"], case["sum"])
            assert (sizes == 1).sum() == case["clients_with_1_sample"]


@pytest.mark.parametrize("order", ["grouped", "shuffled"])
def test_label_skews_replay_the_authors_draw(order):
    labels = np.repeat(np.arange(7), DERMA) if order == "grouped" else labels_of(DERMA)
    for case in read_oracles("partition_label_authors"):
        kind = {"Dirichlet": DirichletSkew, "Pathological": PathologicalSkew}[case["rule"]]
        clients = kind(case["c"], variant="released_code").partition(labels, case["N"], case["seed"])
        expected, counts = case["expected"], counts_of(clients, labels)
        assert counts.sum(0).tolist() == expected["class_totals"]
        assert len(np.unique(np.concatenate(clients))) == expected["unique_used"]
        assert counts[:2].tolist() == [expected["client0"], expected["client1"]]
        assert [len(clients[0]), len(clients[1])] == expected["client_sizes"]
        assert (counts > 0).sum(1).mean() == pytest.approx(expected["mean_classes_per_client"], abs=5e-3)


def test_released_code_gives_whole_classes_again_when_they_run_out():
    labels = labels_of([3, 200])
    clients = DirichletSkew(1.0, variant="released_code").partition(labels, 5, 0)
    assert [len(client) for client in clients] == [43, 40, 40, 40, 40]
    used = np.bincount(np.concatenate(clients), minlength=len(labels))[labels == 0]
    assert used.max() - used.min() <= 1
    assert used.min() > 1


def test_dirichlet_follows_equation_2():
    # The mean of p over clients is 1 / N, its variance (N - 1) / (N^2 (N c + 1)); with a large c the shares are even.
    labels = labels_of([20000] * 10)
    shares = counts_of(DirichletSkew(0.5, min_samples=0).partition(labels, 20, 1), labels) / 20000
    np.testing.assert_allclose(shares.sum(0), 1)
    assert shares.var() == pytest.approx(19 / (400 * 11), rel=0.35)
    even = counts_of(DirichletSkew(1e9).partition(labels, 20, 1), labels)
    assert even.min() >= 999
    assert even.max() <= 1001


def test_without_a_minimum_dirichlet_leaves_clients_empty_as_equation_2_does():
    empty = [
        sum(len(client) == 0 for client in DirichletSkew(0.01, min_samples=0).partition(labels_of(DERMA), 100, seed))
        for seed in range(10)
    ]
    assert np.mean(empty) == pytest.approx(62, abs=6)


def test_repair_takes_from_the_largest_client_and_its_smallest_class():
    labels = labels_of([50, 50, 50])
    raw = DirichletSkew(1e-6, min_samples=0).partition(labels, 30, 0)
    repaired = DirichletSkew(1e-6, min_samples=1).partition(labels, 30, 0)
    before, after = counts_of(raw, labels), counts_of(repaired, labels)
    needy = before.sum(1) == 0
    assert needy.sum() >= 27
    assert (after[needy].sum(1) == 1).all()
    donors = np.flatnonzero(before.sum(1) > after.sum(1))
    assert after[donors].sum(1).max() - after[donors].sum(1).min() <= 1
    for donor in donors:
        given = before[donor] - after[donor]
        smallest = np.flatnonzero(before[donor])[0]
        assert given[smallest] == min(given.sum(), before[donor, smallest])


def test_balance_keeps_clients_near_the_mean():
    labels = labels_of([1000] * 10)
    free = max(map(len, DirichletSkew(0.1).partition(labels, 20, 0)))
    capped = max(map(len, DirichletSkew(0.1, balance=True).partition(labels, 20, 0)))
    # A client is closed only once it holds n / N = 500, so that one class may carry it further.
    assert capped <= 500 + 1000
    assert capped < free


def test_pathological_clients_hold_exactly_c_classes_split_evenly():
    labels = labels_of(BLOOD)
    for c in (1, 2, 3, 8):
        counts = counts_of(PathologicalSkew(c).partition(labels, 100, 2), labels)
        held = counts > 0
        assert (held.sum(1) == c).all()
        assert held.sum(0).min() >= 1
        assert held.sum(0).max() - held.sum(0).min() <= 1
        for k in range(8):
            shares = counts[held[:, k], k]
            assert shares.max() - shares.min() <= 1


def test_pathological_mixes_classes():
    labels = labels_of([500] * 10)
    held = counts_of(PathologicalSkew(2).partition(labels, 200, 0), labels) > 0
    pairs = {tuple(np.flatnonzero(row)) for row in held}
    assert len(pairs) > 35


@pytest.mark.parametrize(("num_clients", "c", "num_classes"), [(3, 4, 10), (5, 2, 10), (2, 1, 2), (1, 3, 3), (7, 2, 9)])
def test_pathological_covers_every_class_where_places_suffice(num_clients, c, num_classes):
    labels = labels_of([20] * num_classes)
    counts = counts_of(PathologicalSkew(c).partition(labels, num_clients, 1), labels)
    assert ((counts > 0).sum(1) == c).all()
    assert (counts.sum(0) == 20).all()


def test_pathological_warns_of_classes_nobody_can_hold():
    labels = labels_of([20] * 10)
    with pytest.warns(UserWarning, match=r"3 clients of 2 classes hold at most 6 of 10 classes: 80 samples"):
        clients = PathologicalSkew(2).partition(labels, 3, 0)
    used = np.concatenate(clients)
    assert len(np.unique(used)) == len(used) == 120


def test_pathological_holds_fewer_classes_only_where_samples_run_out():
    labels = labels_of([15, 15, 15])
    with pytest.warns(UserWarning, match="some hold fewer"):
        counts = counts_of(PathologicalSkew(2).partition(labels, 30, 0), labels)
    assert counts.sum() == 45
    assert set((counts > 0).sum(1)) == {1, 2}
    scarce = labels_of([5, 100, 100])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        counts = counts_of(PathologicalSkew(2).partition(scarce, 30, 0), scarce)
    assert ((counts > 0).sum(1) == 2).all()


def test_labels_need_not_be_consecutive():
    labels = np.array([3, 10, 10, 3, 7, 7] * 10)
    for skew in (DirichletSkew(0.5), PathologicalSkew(2)):
        assert_each_sample_once(skew.partition(labels, 6, 0), 60)
    assert_each_sample_once(PathologicalSkew(3).partition(labels, 6, 0), 60)
    with pytest.raises(ValueError, match="3 classes"):
        PathologicalSkew(4).partition(labels, 6, 0)
    spread = DirichletSkew(100.0, variant="released_code").partition(labels, 6, 0)
    assert set(np.unique(labels[np.concatenate(spread)])) == {3, 7, 10}


def test_released_code_that_would_not_end_is_refused():
    labels = np.array([0, 2] * 30)
    with pytest.raises(ValueError, match=r"would not end: the class prior of client \d+ lies on classes without"):
        PathologicalSkew(1, variant="released_code").partition(labels, 10, 0)
    with pytest.raises(ValueError, match="random picks"):
        DirichletSkew(1.0, variant="released_code").partition(np.zeros(39_999, int), 20_000, 0)


def test_released_code_survives_an_underflowing_prior():
    labels = labels_of([50] * 7)
    clients = DirichletSkew(1e-5, variant="released_code").partition(labels, 50, 0)
    assert sum(map(len, clients)) == len(labels)


@pytest.mark.parametrize(
    "skew",
    [
        Iid(min_samples=40),
        DirichletSkew(0.1, min_samples=40),
        DirichletSkew(0.1, min_samples=40, variant="released_code"),
        PathologicalSkew(1, min_samples=40),
        QuantitySkew(0.1, min_samples=40),
    ],
    ids=repr,
)
def test_impossible_minimum_is_refused_at_once(skew):
    with pytest.raises(ValueError, match=r"cannot deal 300 samples to 100 clients with at least 40 each"):
        skew.partition(labels_of([100, 100, 100]), 100, 0)


def test_pathological_minimum_that_the_classes_cannot_give_is_refused():
    with pytest.raises(ValueError, match=r"the smallest would hold 2; lower"):
        PathologicalSkew(1, min_samples=30).partition(labels_of([2, 98, 100]), 3, 0)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: DirichletSkew(0), "`concentration` must be a finite number above 0, got 0"),
        (lambda: DirichletSkew(float("nan")), "`concentration`"),
        (lambda: QuantitySkew(float("inf")), "`concentration`"),
        (lambda: DirichletSkew(min_samples=-1), "`min_samples` must be an integer of at least 0"),
        (lambda: QuantitySkew(min_samples=1.5), "`min_samples`"),
        (lambda: PathologicalSkew(0), "`classes_per_client` must be an integer of at least 1"),
        (lambda: PathologicalSkew(True), "`classes_per_client`"),
        (lambda: Iid("paper2"), "`variant` must be one of 'paper', 'released_code', got 'paper2'"),
        (lambda: DirichletSkew(balance=True, variant="released_code"), "`balance=True` needs `variant='paper'`"),
        (lambda: Iid().partition(np.zeros(4, int), 0), "`num_clients` must be an integer of at least 1"),
        (lambda: Iid().partition(np.zeros(4, int), 2, -1), "`seed`"),
        (lambda: Iid(min_samples=0).partition(np.zeros(0, int), 2), "cannot deal 0 samples"),
        (lambda: DirichletSkew().partition(np.zeros((4, 14), int), 2), "multi-label"),
        (lambda: PathologicalSkew(3).partition(np.array([0, 1]), 1), "more than the 2 classes"),
    ],
)
def test_wrong_arguments_get_a_sentence(build, message):
    with pytest.raises((TypeError, ValueError)) as caught:
        build()
    assert message in str(caught.value)


def test_labels_must_be_whole_numbers():
    with pytest.raises(TypeError, match="float64"):
        DirichletSkew().partition(np.array([0.0, 1.0]), 1)


def test_empty_clients_only_on_request():
    for skew in (
        Iid(min_samples=0),
        DirichletSkew(min_samples=0),
        QuantitySkew(min_samples=0),
        PathologicalSkew(1, min_samples=0),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            clients = skew.partition(labels_of([2, 3]), 8, 0)
        assert_each_sample_once(clients, 5)
        assert len(clients) == 8


@pytest.mark.parametrize("skew", [DirichletSkew(0.1), PathologicalSkew(2), QuantitySkew(0.1, min_samples=3)], ids=repr)
def test_many_clients(skew):
    # A scan of all clients per moved sample would keep this busy for minutes.
    labels = np.random.default_rng(0).integers(0, 10, 200_000)
    clients = skew.partition(labels, 40_000, 0)
    assert len(clients) == 40_000
    assert_each_sample_once(clients, len(labels))


def test_a_skew_names_itself_and_its_configuration():
    for kind in (Iid, DirichletSkew, PathologicalSkew, QuantitySkew):
        skew = kind()
        config = skew.as_config()
        assert config["class_path"].endswith(kind.__name__)
        assert set(config["init_args"]) == set(inspect.signature(kind).parameters)
    assert repr(DirichletSkew(0.3)) == "DirichletSkew(concentration=0.3, variant='paper', min_samples=1, balance=False)"
    assert issubclass(Iid, Skew)


BY_CLASS = [
    DirichletSkew(0.5),
    DirichletSkew(0.5, "released_code"),
    PathologicalSkew(2),
    PathologicalSkew(2, "released_code"),
]
IDS = {
    "large": np.array([7, 10**12, 10**15]),
    "negative": np.array([-30, -7, 4]),
    "unsigned": np.array([3, 2**62, 2**64 - 1], np.uint64),
    "strings": np.array(["cat", "dog", "hen"]),
    "objects": np.array(["cat", "dog", "hen"], object),
}


@pytest.mark.parametrize("name", IDS)
@pytest.mark.parametrize("skew", BY_CLASS, ids=repr)
def test_any_numbers_or_strings_are_dealt_as_classes_from_0_are(skew, name):
    numbers = labels_of([20, 30, 25])
    expected = skew.partition(numbers, 6, 3)
    for labels in (IDS[name][numbers], IDS[name][numbers][:, None]):
        for client, other in zip(skew.partition(labels, 6, 3), expected, strict=True):
            np.testing.assert_array_equal(client, other)


@pytest.mark.parametrize("skew", BY_CLASS, ids=repr)
def test_samples_without_a_class_are_refused_where_classes_decide(skew):
    labels = np.array([0, 1, -1, 1, -1] * 10)
    with pytest.raises(
        ValueError, match=r"deals by class, and 20 of 50 labels are -1, which marks samples without one: "
    ):
        skew.partition(labels, 3, 0)
    signs = skew.partition(np.array([-1, 1] * 10), 3, 0)
    assert sum(map(len, signs)) == 20


@pytest.mark.parametrize(
    "labels",
    [np.arange(-20, 20), np.arange(40) + 10**12, np.linspace(0, 1, 40), np.zeros((40, 14), int), ["word"] * 40],
    ids=["negative", "large", "floats", "multi-label", "strings"],
)
@pytest.mark.parametrize("skew", [Iid(), QuantitySkew(1.0)], ids=repr)
def test_where_classes_do_not_decide_targets_may_be_anything(skew, labels):
    expected = skew.partition(np.zeros(40, int), 4, 1)
    for client, other in zip(skew.partition(labels, 4, 1), expected, strict=True):
        np.testing.assert_array_equal(client, other)


def test_the_classes_that_stay_unused_have_the_names_they_were_given():
    with pytest.warns(UserWarning, match="samples of the classes (cat|dog|hen) stay unused"):
        PathologicalSkew(1).partition(np.array(["cat", "dog", "hen"] * 4), 2, 0)


def test_long_arguments_are_shortened():
    class BySite(Iid):
        def __init__(self, site):
            self.site = site

    assert len(repr(BySite([f"hospital {k}" for k in range(1000)]))) < 200
    assert len(repr(BySite(np.arange(1000.0)))) < 200
