"""PosConfig: RecBole's Config with the plugin's defaults, checked keys and types, and no eval."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import recbole
from recbole.config import Config
from recbole.utils import ModelType, get_model

from recbole_pos.config.checks import (
    check_negatives,
    check_own,
    check_read,
    check_together,
    check_value,
)
from recbole_pos.config.defaults import (
    add_time_field,
    free_options,
    own_defaults,
    plugin_defaults,
    starts_from_runs,
)
from recbole_pos.config.option import IGNORED
from recbole_pos.config.options import find_option, list_by_role
from recbole_pos.config.plugins import find_modules, import_plugins, require_spelling, take_model
from recbole_pos.config.presets import list_positions, parts_for, preset_or_file
from recbole_pos.data.identity import FILTERS
from recbole_pos.data.item_vectors import make_absolute, to_files
from recbole_pos.data.location import atomic_file, name_and_folder
from recbole_pos.errors import RunWarning, UnknownKey, UsageError
from recbole_pos.model.models import (
    ADDED,
    CAUSAL_BUILTINS,
    LOSSES,
    OURS,
    built_in,
    on_our_base,
    registered_name,
    runnable,
    served,
)
from recbole_pos.plain import to_plain
from recbole_pos.position.schemes import SCHEMES
from recbole_pos.values import is_whole, nearest, shown, suggest
from recbole_pos.yaml_files import ROOT, PackagedLoader, read_yaml

WHEEL_DATASETS = Path(recbole.__file__).parent / "dataset_example"
EXTRA_KEYS = {"model", "dataset"}  # keys that name a run and have no default
PLUGINS = "plugins"  # option: modules that register the model or its schemes
WINDOWS = 128  # train_batch_size where RecBole's models learn all positions, as the plugin's do
ARGUMENTS = ("run_dir", "resume", "nproc")  # arguments of run that are taken for options
# Keys that RecBole computes itself and keeps in the same dict.
DERIVED_KEYS = {"MODEL_TYPE"}
_DEFAULTS = "the attribute `defaults`, or recbole_pos.register_model(..., defaults=...)"


# Options of version 0.2.0, and what replaces their effect.
_REMOVED = {"batch_shapes": "batches have the sizes of their windows"}


def merge_options(low: dict[str, Any], high: dict[str, Any]) -> dict[str, Any]:
    """Merge the options of two sources: ``high`` wins, and ``eval_args`` is merged key by key."""
    eval_args = [source["eval_args"] for source in (low, high) if source.get("eval_args")]
    merged = {**low, **high}
    if len(eval_args) == 2 and all(isinstance(value, dict) for value in eval_args):
        merged["eval_args"] = {**eval_args[0], **eval_args[1]}
    return merged


class PosConfig(Config):
    """Configuration of one run, for the plugin's models and RecBole's.

    Priority, lowest first: RecBole's yaml files, ``properties/`` of the plugin, ``<dataset>.yaml``
    beside the atomic files, ``config_file_list`` in order (in each, what stands under ``for`` and
    is for this run above the rest), ``config_dict``; ``eval_args`` is merged key by key.

    Args:
        model: name of a plugin model, of a usable model of RecBole or of one that was registered,
            or a class; None to read it from a file.
        dataset: name of the dataset; None to read it from a file.
        config_file_list: yaml files.
        config_dict: plain values that win over everything else.
        strict: whether an option that changes nothing for this model and protocol is an error; not
            for a run that exists, nor for a trial, whose options depend on each other.

    Raises:
        UsageError: for an unknown key (naming the nearest known ones), a value of the wrong type,
            an option that changes nothing, an unknown model, or anything else RecBole's Config
            refuses.

    Attributes:
        plain: the complete configuration as given, before RecBole derives values from it; writing
            it to a yaml file and running that file repeats the run.
    """

    def __init__(
        self,
        model: str | type | None = None,
        dataset: str | None = None,
        config_file_list: list[str] | None = None,
        config_dict: dict[str, Any] | None = None,
        strict: bool = True,
    ) -> None:
        self.strict = strict
        self.asked = registered_name(model) if isinstance(model, type) else model
        self.public: dict[str, Any] = {}  # facts in the yaml of a public dataset
        self.asked_for: set[str] = set()  # options that a model read although no source has them
        try:
            super().__init__(self.asked, dataset, config_file_list, config_dict)
        except UsageError:
            raise
        except (ValueError, TypeError, KeyError, NotImplementedError, RuntimeError) as error:
            message = error.args[0] if error.args else error
            raise UsageError(f"configuration: {message}") from error
        except OSError as error:  # data_path is a name that no file can have
            if error.filename is None:  # but the working directory is gone
                raise
            name = shown(error.filename)
            raise UsageError(f"configuration: {error.strerror}: {name}; see data_path") from error

    def __getitem__(self, key: str) -> Any:
        """Return an option's value; None, as in RecBole, for one without, which is recorded."""
        final = self.__dict__.get("final_config_dict", {})
        if key not in final:
            self.asked_for.add(key)
        return final.get(key)

    def _build_yaml_loader(self) -> type:
        return PackagedLoader  # of RecBole's own files

    def _load_cmd_line(self) -> dict[str, Any]:
        return {}  # cli.py parses arguments; a library must not read sys.argv

    def _load_config_files(self, file_list: list[str] | None) -> dict[str, Any]:
        """Read config files into ``files``; their options depend on the model, see _options_for."""
        self.files: list[tuple[str | Path, dict[str, Any]]] = [
            (file, self._drop_removed(read_yaml(preset_or_file(file)), f"{file}: "))
            for file in file_list or []
        ]
        return {}

    def _load_variable_config_dict(self, config_dict: dict[str, Any] | None) -> dict[str, Any]:
        """Copy ``config_dict``, whose values are typed already: RecBole would eval strings."""
        options = self._drop_removed(dict(config_dict or {}))
        if "item_vectors" in options:  # vectors in memory become a file
            options["item_vectors"] = to_files(options["item_vectors"])
        return options

    def _drop_removed(self, options: dict[str, Any], where: str = "") -> dict[str, Any]:
        """Remove options of earlier versions from a mapping; warn of them in a new run."""
        for key in _REMOVED.keys() & options.keys():
            if self.strict:
                text = f"{where}{key} has no effect any more: {_REMOVED[key]}; leave it out"
                warnings.warn(text, RunWarning, stacklevel=2)
            del options[key]
        return options

    def _merge_external_config_dict(self) -> None:
        self.plugins: list[str] = []
        self._import_plugins()
        self.external_config_dict = self._options_for()

    def _import_plugins(self) -> None:
        """Import the modules that any source names, so that what they register can be named."""
        sources = [*self.files, ("configuration", self.variable_config_dict)]
        models = [self.asked, *(content.get("model") for _, content in sources)]
        positions = [content.get("position") for _, content in sources]
        schemes = [name for value in positions for name in list_positions(value, None)]

        def are_registered() -> bool:
            """Return whether all custom names are registered already, without the modules."""
            known = [name in ADDED for name in models if name and name not in built_in()]
            known += [name in SCHEMES for name in schemes if name not in SCHEMES.places]
            return bool(known) and all(known)

        for file, content in sources:
            self.plugins += import_plugins(content.get(PLUGINS), str(file), are_registered)
        for name in filter(None, models):
            take_model(str(name), self.plugins)
        has_schemes = all(name in SCHEMES for name in schemes)
        if not (has_schemes and all(name in runnable() for name in models if name)):
            for file, content in sources:
                require_spelling(content, str(file))

    def _options_for(self, *names: str) -> dict[str, Any]:
        """Merge the options that config files and ``config_dict`` give a model and its schemes.

        Records in ``sources`` which file each option came from.
        """
        merged: dict[str, Any] = {}
        self.sources: dict[str, str] = {}  # option -> file that gave it, for messages
        for file, content in self.files:
            for where, options in parts_for(content, names, file):
                merged = merge_options(merged, options)
                self.sources.update(dict.fromkeys(options, where))
        for key in self.variable_config_dict:
            self.sources.pop(key, None)
        return merge_options(merged, self.variable_config_dict)

    def _get_model_and_dataset(
        self, model: str | None, dataset: str | None
    ) -> tuple[str, type, str]:
        """Find the model's class and the dataset's folder.

        Raises:
            UsageError: if either is not given, or the model is unknown.
        """
        model = model or self.external_config_dict.get("model")
        dataset = dataset or self.external_config_dict.get("dataset")
        if not model or not dataset:
            missing = "model (-m)" if not model else "dataset (-d)"
            raise UsageError(f"no {missing} given, on the command line or in a config file")
        data_path = self._options_for(str(model)).get("data_path") or "dataset/"
        dataset, folder = name_and_folder(str(dataset), str(data_path))
        if folder is not None:
            self.variable_config_dict["data_path"] = folder
        self._read_files_for(str(model), dataset)
        if model in OURS:
            return model, OURS[model], dataset
        if model not in runnable():
            raise UsageError(
                f"{self._where('model')}unknown model {shown(model)}"
                f"{suggest(str(model), runnable())}; `recbole-pos models` lists what can be run. "
                "One of your own: name the module that has it, as in --plugins='[my_models]', or "
                "in Python call recbole_pos.register_model first"
            )
        return model, get_model(model), dataset

    def _where(self, key: str) -> str:
        """Return the start of a message about an option: ``file: `` if a file gave it."""
        return f"{self.sources[key]}: " if key in self.sources else ""

    def _read_files_for(self, model: str, dataset: str) -> None:
        """Merge the options once the model is known: the dataset's yaml, then the config files."""
        folder = Path(str(self._options_for(model).get("data_path", "dataset/"))) / dataset
        file = folder / f"{dataset}.yaml"
        if file.is_file():
            content = read_yaml(file)
            self.public = {**(content.pop("public", None) or {}), **content}
            self.files.insert(0, (file, content))
            if PLUGINS in self.files[0][1]:
                raise UsageError(f"{file}: {PLUGINS} belong to a run, and not to a dataset")
        schemes = list_positions(self._options_for(model).get("position"), model)
        self.external_config_dict = self._options_for(model, *schemes)
        registered = [name for name in schemes if name in SCHEMES]
        modules = list(dict.fromkeys([*self.plugins, *find_modules(model, registered)]))
        if modules:  # so that a process that reads the configuration of this run knows them
            self.external_config_dict[PLUGINS] = modules

    def _load_internal_config_dict(self, model: str, model_class: type, dataset: str) -> None:
        super()._load_internal_config_dict(model, model_class, dataset)
        if not served(model):
            position = self.external_config_dict.get("position")
            self.internal_config_dict.update(plugin_defaults(model, position))

    def _get_final_config_dict(self) -> dict[str, Any]:
        """Check all options, and merge defaults with what is given.

        Raises:
            UsageError: for an unknown option, a wrong value, or options that contradict each other.
        """
        external = self.external_config_dict
        self.free = free_options(self.model, list_positions(external.get("position"), self.model))
        if self.model in ADDED:
            for key, value in own_defaults(self.model).items():
                self._check_value(f"defaults of {self.model}", key, value)
        self._check(external)
        final = self._merge_defaults(external)
        losses = LOSSES if on_our_base(self.model) else ("CE", "BPR")
        shared = {key: value for key, value in final.items() if key not in self.free}
        starts = starts_from_runs(self.model)
        check_together(shared, self.model, plugin_model=starts, losses=losses)
        self._keep_plain(final)
        if self.strict:
            self.require_read()
        return final

    def _merge_defaults(self, external: dict[str, Any]) -> dict[str, Any]:
        """Return defaults with the given options above them; some defaults depend on options."""
        final = {**self.internal_config_dict, **external}
        defaults = self.internal_config_dict["eval_args"]
        final["eval_args"] = {**defaults, **(external.get("eval_args") or {})}
        is_sequential = final["MODEL_TYPE"] == ModelType.SEQUENTIAL
        if is_sequential and final.get("loss_type") == "CE":
            # RecBole refuses its own default of one negative under cross-entropy
            if "train_neg_sample_args" not in external:
                final["train_neg_sample_args"] = None
        windows = self.model in CAUSAL_BUILTINS and final["augmentation"] == "all_positions"
        if windows and "train_batch_size" not in external:
            final["train_batch_size"] = WINDOWS  # RecBole's 2,048 are rows of one target
        final["load_col"] = add_time_field(final)
        return final

    def _keep_plain(self, final: dict[str, Any]) -> None:
        """Keep in ``plain`` the configuration that repeats the run, also from another folder."""
        self.plain = to_plain({key: v for key, v in final.items() if key not in _list_derived()})
        self.plain.update(model=self.model, dataset=self.dataset)
        base = Path(str(final["data_path"]))
        self.plain["item_vectors"] = make_absolute(self.plain["item_vectors"])
        if (base / self.dataset).is_dir():
            self.plain["data_path"] = str(base.resolve())

    def require_read(self, searched: Iterable[str] = ()) -> None:
        """Refuse options that were given although nothing reads them.

        Args:
            searched: options that a search varies, whose values are not known yet.

        Raises:
            UsageError: naming the option, and under which condition it is read.
        """
        plain = {**self.plain, "MODEL_TYPE": self.internal_config_dict["MODEL_TYPE"]}
        config = {
            key: {**inner, **value} if (inner := find_option(key).inner) and value else value
            for key, value in plain.items()
            if key not in searched
        }
        defaults = self.internal_config_dict
        # a file that has most options is written by a run: the user did not choose them
        exempt = [
            str(file)
            for file, content in self.files
            if len(defaults.keys() & content) > len(defaults) / 2
        ]
        self.strict = self.strict and not exempt
        # presets serve the baselines of their paper, too
        exempt += [str(f) for f, _ in self.files if preset_or_file(f).is_relative_to(ROOT)]
        for key, value in self.external_config_dict.items():
            where = self.sources.get(key, "configuration")
            if key not in self.free and where not in exempt:
                check_read(where, key, value, defaults.get(key), config)

    def _set_default_parameters(self) -> None:
        """Let ``data_path`` be the dataset's folder: RecBole's wheel has ml-100k if it is not here.

        RecBole would take its own ml-100k in any case.
        """
        base = Path(str(self.final_config_dict["data_path"]))
        super()._set_default_parameters()
        folder, in_wheel = base / self.dataset, WHEEL_DATASETS / self.dataset
        own, packaged = (atomic_file(place, self.dataset, "inter") for place in (folder, in_wheel))
        is_benchmark = self.final_config_dict["benchmark_filename"]
        if not (is_benchmark or own.is_file()) and packaged.is_file():
            folder = in_wheel
        self.final_config_dict["data_path"] = str(folder)
        if not self.final_config_dict["use_gpu"]:  # RecBole chooses the device by gpu_id only
            self.final_config_dict["gpu_id"] = ""

    def _set_train_neg_sample_args(self) -> None:
        super()._set_train_neg_sample_args()
        check_negatives(self.final_config_dict, self.model)

    def _check(self, options: dict[str, Any]) -> None:
        """Refuse unknown keys and wrong values; turn whole numbers of float options into floats.

        Raises:
            UsageError: naming the key, and the file that gave it.
        """
        known = {*self.internal_config_dict, *EXTRA_KEYS, PLUGINS} - DERIVED_KEYS
        for key, value in options.items():
            where = self.sources.get(key, "configuration")
            if key in ARGUMENTS:
                raise UsageError(
                    f"{where}: {key} is not an option: give it on the command line (--{key}) or as "
                    f"an argument, as in recbole_pos.run(..., {key}=...)"
                )
            if key not in known:
                declare = f"; what it reads of its own stands in its defaults ({_DEFAULTS})"
                raise UnknownKey(
                    f"{where}: unknown key {shown(key)}{nearest(str(key), known)}. "
                    f"{self.model} on {self.dataset} does not read it"
                    f"{declare if self.model in ADDED else ''}",
                    key,
                )
            default = self.internal_config_dict.get(key)
            if find_option(key).role == IGNORED and value != default:
                raise UsageError(f"{where}: {key}: {find_option(key).why}")
            self._check_value(where, key, value)
            if isinstance(default, float) and isinstance(value, int):
                options[key] = float(value)  # RecBole's models raise tensors of integers to powers

    @property
    def expected_counts(self) -> dict[str, int]:
        """Return the numbers of users, items and events that a public dataset must have.

        Empty for other datasets, and where the run filters otherwise than the dataset's yaml.
        """
        default = self.internal_config_dict
        is_usual = all(self[key] == self.public.get(key, default.get(key)) for key in FILTERS)
        return self.public.get("counts", {}) if is_usual else {}

    def _check_value(self, where: str, key: str, value: Any) -> None:
        check = check_own if key in self.free else check_value
        check(where, key, value, self.internal_config_dict.get(key))


def to_plain_options(config: Config) -> dict[str, Any]:
    """Return the plain options that make a configuration again, of PosConfig's or RecBole's.

    RecBole's ``data_path`` is the dataset's folder, and its configuration takes unknown keys.
    """
    if isinstance(config, PosConfig):
        return config.plain
    known = config.internal_config_dict
    options = {**known, **config.external_config_dict}
    plain = {key: options[key] for key in known if key not in _list_derived()}
    plain |= {key: config[key] for key in EXTRA_KEYS}
    plain["data_path"] = str(Path(config["data_path"]).resolve().parent)
    schemes = list_positions(options.get("position"), config["model"])
    if modules := find_modules(config["model"], [name for name in schemes if name in SCHEMES]):
        plain[PLUGINS] = modules
    return to_plain(plain)


def _list_derived() -> set[str]:
    return {*DERIVED_KEYS, *list_by_role(IGNORED)}


def limit_workers(plain: dict[str, Any]) -> dict[str, Any]:
    """Return ``worker`` lowered to what this machine allows; empty where it need not change."""
    worker, most = plain.get("worker", 0), find_option("worker").high
    return {"worker": most} if is_whole(worker) and most is not None and worker > most else {}
