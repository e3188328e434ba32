import math
import tomllib
from dataclasses import fields, is_dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vafl.config import Config, from_document, read_config
from vafl.config.run_settings import StopSettings
from vafl.data.settings import DataSettings, PartitionSettings
from vafl.errors import ConfigError
from vafl.models.settings import EmbeddingSettings, ModelSettings
from vafl.privacy.settings import PrivacySettings
from vafl.protocol.schedule import ScheduleSettings
from vafl.protocol.settings import OptimiserSettings, RuleSettings
from vafl.simulation.delays import DelaySettings, DropOut


def refused(said, **document):
    with pytest.raises(ConfigError, match=said):
        from_document(document)


def read(folder, text="", overrides=()):
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return read_config(path, list(overrides))


# --- reading ---


def test_an_empty_file_is_the_default_run(tmp_path):
    assert read(tmp_path) == Config()


def test_every_section_is_read(tmp_path):
    found = read(
        tmp_path,
        """
        seed = 7
        [embedding]
        model = "mlp"
        hidden = [8, 4]
        [rule]
        name = "t-sync"
        t = 3
        [optimiser]
        step_size = 1
        options = { momentum = 0.9 }
        [partition.groups]
        bank = ["pay_*", "limit"]
        [stop]
        metric = 1
        [[delays.dropouts]]
        client = 2
        start = 1
        end = inf
        """,
    )
    assert found.seed == 7
    assert found.embedding == EmbeddingSettings(model="mlp", hidden=(8, 4))
    assert found.rule == RuleSettings(name="t-sync", t=3)
    assert found.optimiser == OptimiserSettings(step_size=1.0, options={"momentum": 0.9})
    assert type(found.optimiser.step_size) is float
    assert found.partition.groups == {"bank": ("pay_*", "limit")}
    assert (found.stop.metric, type(found.stop.metric)) == (1.0, float)
    assert found.delays.dropouts == (DropOut(2, 1.0, math.inf),)


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"[rule\n", "VFL-1022"), (b"\xff\xfe", "VFL-1022")],
)
def test_a_file_that_is_no_toml(tmp_path, content, said):
    (tmp_path / "run.toml").write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        read_config(tmp_path / "run.toml")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="VFL-1021"):
        read_config(tmp_path / "none.toml")


def test_relative_paths_are_taken_from_the_files_folder(tmp_path):
    data = '[data]\nname = "csv"\nlabel = "y"\npath = "tables/a.csv"\n'
    text = data + '[delays]\nkind = "trace"\ntrace = "../t.csv"\n'
    found = read(tmp_path, text)
    assert found.data.path == str((tmp_path / "tables" / "a.csv").resolve())
    assert found.delays.trace == str((tmp_path.parent / "t.csv").resolve())
    absolute = str((tmp_path / "b.csv").resolve())
    assert read(tmp_path, text, [f"data.path={absolute}"]).data.path == absolute
    assert read(tmp_path, '[data]\npath = ""\n').data.path == ""


# --- what is refused ---


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"rul": {}}, r'VFL-1032.*rul.*Did you mean "rule"\?'),
        ({"optimizer": {}}, r'VFL-1032.*optimizer.*Did you mean "optimiser"\?'),
        ({"rule": {"delay": 3}}, r'VFL-1032.*rule\.delay.*Did you mean "delay_bound"\?'),
        ({"schedule": {"batchsize": 3}}, r'VFL-1032.*schedule\.batchsize.*Did you mean "batch_size"\?'),
        ({"stop": {"zzz": 3}}, r"VFL-1032.*stop\.zzz"),
        (
            {"delays": {"dropouts": [{"cliant": 1}]}},
            r'VFL-1032.*delays\.dropouts\.cliant.*Did you mean "client"\?',
        ),
    ],
)
def test_unknown_keys_get_a_hint(document, said):
    refused(said, **document)


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"seed": "1"}, r"VFL-1034.*seed.*a whole number.*'1'"),
        ({"seed": 1.0}, r"VFL-1034.*seed.*a whole number.*1\.0"),
        ({"seed": True}, r"VFL-1034.*seed.*a whole number.*True"),
        ({"rule": 3}, r"VFL-1031.*rule.*3"),
        ({"rule": {"name": 3}}, r"VFL-1037.*rule\.name.*async, t\-sync, sync, centralised.*3"),
        ({"rule": {"name": ["async"]}}, r"VFL-1037.*rule\.name"),
        ({"rule": {"name": "asinc"}}, "VFL-1037.*'asinc'.* Did you mean \"async\"\\?"),
        ({"rule": {"t": 1.5}}, r"VFL-1034.*rule\.t.*a whole number.*1\.5"),
        ({"data": {"path": 3}}, r"VFL-1034.*data\.path.*text in quotes.*3"),
        ({"privacy": {"mu_max": "none"}}, "VFL-1036.*privacy\\.mu_max.*a number or \"unlimited\".*'none'"),
        ({"privacy": {"mu_max": True}}, r'VFL-1036.*privacy\.mu_max.*a number or "unlimited".*True'),
        ({"data": {"ignore": "a"}}, r"VFL-1034.*data\.ignore.*a list, each item text in quotes.*'a'"),
        ({"data": {"ignore": ["a", 3]}}, r"VFL-1034.*data\.ignore.*text in quotes.*3"),
        ({"embedding": {"hidden": [4, "x"]}}, r"VFL-1034.*embedding\.hidden.*a whole number.*'x'"),
        ({"optimiser": {"step_size": "0.1"}}, r"VFL-1034.*optimiser\.step_size.*a number.*'0\.1'"),
        ({"optimiser": {"l2": True}}, r"VFL-1034.*optimiser\.l2.*a number.*True"),
        ({"optimiser": {"options": 3}}, r"VFL-1034.*optimiser\.options.*a section.*3"),
        (
            {"partition": {"groups": {"a": "x"}}},
            r"VFL-1034.*partition\.groups\.a.*a list, each item text in quotes",
        ),
        ({"stop": {"metric": "0.9"}}, r"VFL-1034.*stop\.metric.*a number.*'0\.9'"),
        ({"delays": {"dropouts": [3]}}, r"VFL-1031.*delays\.dropouts.*3"),
        ({"delays": {"dropouts": {"client": 1}}}, r"VFL-1034.*delays\.dropouts.*a list, each item a section"),
        ({"delays": {"dropouts": [{"client": 1}]}}, r"VFL-1033.*delays\.dropouts.*start, end.*client"),
        ({"seed": -1}, r"VFL-1011.*\-1"),
        ({"threads": 0}, r"VFL-1012.*0"),
        ({"rule": {"delay_bound": -1}}, "VFL-4192"),
        ({"schedule": {"batch_size": -1}}, r"VFL-4091.*\-1"),
    ],
)
def test_wrong_values_name_what_was_expected_and_found(document, said):
    refused(said, **document)


# --- overrides ---


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("rule.name=sync", "rule", "name", "sync"),
        ('rule.name="sync"', "rule", "name", "sync"),
        (" rule.t = 3 ", "rule", "t", 3),
        ("optimiser.step_size=1", "optimiser", "step_size", 1.0),
        ("optimiser.step_size=1e-3", "optimiser", "step_size", 1e-3),
        ("embedding.hidden=[3, 4]", "embedding", "hidden", (3, 4)),
        ("embedding.model=my.module:Factory", "embedding", "model", "my.module:Factory"),
        ("data.ignore=['a', 'b c']", "data", "ignore", ("a", "b c")),
        ("optimiser.options={momentum=0.9}", "optimiser", "options", {"momentum": 0.9}),
        ("optimiser.options.momentum=0.9", "optimiser", "options", {"momentum": 0.9}),
        ("partition.groups.bank=['x=y']", "partition", "groups", {"bank": ("x=y",)}),
        ("delays.dropouts=[{client=1, start=0.0, end=2.0}]", "delays", "dropouts", (DropOut(1, 0.0, 2.0),)),
        ("schedule.refresh=random:30", "schedule", "refresh", "random:30"),
        ("stop.metric=0.9", "stop", "metric", 0.9),
    ],
)
def test_overrides_win_over_the_file(tmp_path, override, section, key, value):
    found = read(tmp_path, '[rule]\nname = "t-sync"\nt = 1\n', [override])
    assert getattr(getattr(found, section), key) == value


def test_overrides_of_the_top_and_of_one_another(tmp_path):
    assert read(tmp_path, "seed = 3", ["seed=4", "threads=2", "seed=5"]) == Config(seed=5, threads=2)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rule.name", r"VFL-1023.*rule\.name"),
        ("=3", r"VFL-1023.*=3"),
        ("rule..t=3", "VFL-1023"),
        ("seed.x=3", r"VFL-1024.*seed\.x=3.*seed"),
        ("rule.tt=3", r"VFL-1032.*rule\.tt"),
        ("rule.t=many", r"VFL-1034.*rule\.t.*a whole number.*'many'"),
        ("rule.t=", r"VFL-1034.*rule\.t.*a whole number"),
        ("rule=3", r"VFL-1031.*rule.*3"),
    ],
)
def test_overrides_that_cannot_be_are_refused(tmp_path, override, said):
    with pytest.raises(ConfigError, match=said):
        read(tmp_path, "seed = 1", [override])


# --- round trip ---

words = st.text(st.characters(blacklist_categories=["Cs"]), max_size=8)
names = st.from_regex(r"c[A-Za-z0-9._-]{1,9}x", fullmatch=True)
positive = st.floats(1e-6, 1e6)
configs = st.builds(
    Config,
    seed=st.integers(0, 2**31),
    data=st.builds(
        DataSettings,
        name=st.just("csv"),
        path=words.filter(bool),
        label=words.filter(bool),
        ignore=st.lists(words).map(tuple),
        test_fraction=st.floats(0.01, 0.99),
    ),
    partition=st.builds(
        PartitionSettings, groups=st.dictionaries(names, st.lists(words).map(tuple), max_size=3)
    ),
    model=st.builds(ModelSettings, width=st.integers(0, 9)),
    embedding=st.builds(EmbeddingSettings, hidden=st.lists(st.integers(1, 99), max_size=8).map(tuple)),
    rule=st.builds(RuleSettings, t=st.integers(1, 9), delay_bound=st.integers(0, 9)),
    schedule=st.builds(ScheduleSettings, refresh=st.sampled_from(["none", "all", "random:7"])),
    optimiser=st.builds(
        OptimiserSettings,
        step_size=positive,
        options=st.sampled_from([{}, {"momentum": 0.5, "nesterov": True}]),
        schedule=st.just("nonconvex-stochastic"),
        constants=st.fixed_dictionaries(
            {"L": positive, "K": st.integers(1, 9), "rho": st.floats(0.1, 0.9), "pbar": st.just([0.5, 1.0])}
        ),
    ),
    privacy=st.just(PrivacySettings())
    | st.builds(
        PrivacySettings,
        mode=st.just("frozen"),
        clip=positive,
        noise=positive,
        mu_max=positive | st.just("unlimited"),
    ),
    delays=st.builds(
        DelaySettings,
        kind=st.just("fixed"),
        seconds=st.lists(positive).map(tuple),
        dropouts=st.sampled_from([(), (DropOut(1, 0.0, 1.5), DropOut(2, 1.0, math.inf))]),
    ),
    stop=st.builds(StopSettings, metric=st.none() | positive),
)


@given(configs)
def test_a_saved_config_reads_back_to_the_same(config):
    assert from_document(tomllib.loads(config.to_toml())) == config


def test_a_saved_config_holds_every_setting_and_is_found_again(tmp_path):
    saved = Config(seed=3).to_toml()
    for section in fields(Config):
        if is_dataclass(getattr(Config(), section.name)):
            assert f"[{section.name}]" in saved
    assert read(tmp_path, saved) == Config(seed=3)
    assert "metric = " in saved, "model.metric"
    assert read(tmp_path, saved).stop.metric is None


def test_batches_that_all_clients_share_are_no_clients_secret():
    schedule = {"seed": "private", "refresh": "none"}
    refused('VFL-1014.*seed = "private"', schedule=schedule, rule={"name": "sync"})
    assert from_document({"schedule": schedule, "rule": {"name": "async"}}).schedule.seed == "private"


# --- the secure sum ---

SECURE = {
    "privacy": {"secure_sum": True},
    "rule": {"name": "sync"},
    "schedule": {"refresh": "none"},
}
REFUSED_WITH_SECURE_SUM = {
    "records that all but one may lack": (
        {"data": {"records": "labelled"}},
        'data.records = "common"',
    ),
    "async": (
        {"rule": {"name": "async"}},
        'rule.name = "sync": asynchronous release would reveal differences between a client\'s embeddings',
    ),
    "t-sync": ({"rule": {"name": "t-sync"}}, 'rule.name = "sync": asynchronous release'),
    "centralised": ({"rule": {"name": "centralised"}}, 'rule.name = "sync"'),
    "query-first": ({"rule": {"name": "sync", "order": "query-first"}}, "rule.order"),
    "a first full upload": ({"rule": {"name": "sync", "start": "upload"}}, "rule.start"),
    "a delay bound": ({"rule": {"name": "sync", "delay_bound": 3}}, "rule.delay_bound = 0.*Found 3"),
    "refresh": ({"schedule": {"refresh": "all"}}, 'schedule.refresh = "none".*Found .all.'),
    "another embedding": ({"embedding": {"model": "mlp"}}, 'embedding.model = "linear"'),
    "another head": ({"model": {"head": "linear"}}, 'model.head = "bias"'),
    "a short encoding": ({"network": {"encoding": "int8"}}, 'network.encoding = "float32"'),
    "a largest norm": ({"network": {"largest_norm": 2.0}}, "network.largest_norm = 0.0"),
}


@pytest.mark.parametrize(
    ("sections", "said"), REFUSED_WITH_SECURE_SUM.values(), ids=REFUSED_WITH_SECURE_SUM.keys()
)
def test_a_secure_sum_refuses_whatever_is_not_one_sum_a_round(sections, said):
    assert from_document(SECURE).privacy.secure_sum
    refused(f"privacy.secure_sum needs {said}", **{**SECURE, **sections})
