"""PosConfig, the configuration of one run: RecBole's Config with the plugin's defaults and checks.

It gathers options from RecBole's and the plugin's yaml files, the dataset's, the user's files and
the call, refuses unknown keys and wrong values, and evaluates no text as Python, as RecBole would.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import recbole
from recbole.config import Config
from recbole.utils import ModelType, get_model

from recbole_pos.config import checks, sources
from recbole_pos.config import options as option_table
from recbole_pos.config.plugins import find_modules, import_plugins, register_class
from recbole_pos.data.identity import FILTERS
from recbole_pos.data.item_vectors import make_absolute, to_file
from recbole_pos.data.loading import find_atomic_file, locate_dataset
from recbole_pos.data.protocol import masks_history
from recbole_pos.errors import PosError, UnknownKey, UsageError
from recbole_pos.model import models
from recbole_pos.values import nearest, shown, to_plain
from recbole_pos.yaml_files import ROOT, PackagedLoader, read_properties, read_yaml

WHEEL_DATASETS = Path(recbole.__file__).parent / "dataset_example"
EXTRA_KEYS = {"model", "dataset"}  # keys that name a run and have no default
DERIVED_KEYS = {"MODEL_TYPE"}  # keys that RecBole computes and keeps among the options
_NOT_KEPT = DERIVED_KEYS | option_table.REFUSED  # left out of a run's config.yaml
_NO_FILE = "configuration"  # for messages, the place of options that come from no file
STARTS = ("init_from", "update_from")  # options: the run whose weights another run starts from
PLUGINS = "plugins"  # option: modules that register the model or its schemes
_WINDOWS_PER_BATCH = 128  # default of models whose examples are windows of histories


class PosConfig(Config):
    """Configuration of one run, for the plugin's models and RecBole's.

    Priority, lowest first: RecBole's yaml files, ``properties/`` of the plugin, ``<dataset>.yaml``
    beside the atomic files, ``config_file_list`` in order (in each file, parts under ``for`` that
    this run takes win over the rest), ``config_dict``; ``eval_args`` is merged key by key.

    Attributes:
        plain: the complete configuration as given, before RecBole derives values from it; writing
            it to a yaml file and running that file repeats the run.
        files: (file, options) of each config file, the dataset's first.
        own_files: paths of the config files that the user wrote; presets are not among them.
        public: facts in the yaml of a public dataset.
        free: options that only a custom model or scheme has, and that may hold anything.
        sources: option -> file that gave it.
        asked_for: options that a model read although no source has them.
        reasons: which defaults the size of the data has changed, a text each (:meth:`adapt`).
    """

    def __init__(
        self,
        model: str | type | None = None,
        dataset: str | None = None,
        config_file_list: list[str] | None = None,
        config_dict: dict[str, Any] | None = None,
        strict: bool = True,
    ) -> None:
        """Gather the options of a run from files and the call, and check them.

        Args:
            model: name of a plugin model, of a usable model of RecBole or of one that was
                registered, or a class; None to read it from a file.
            dataset: name of the dataset; None to read it from a file.
            config_file_list: paths of yaml files, or names of presets.
            config_dict: options as plain values, which win over those of files.
            strict: whether to refuse options that the user gives and this model does not read.
                False for a trial of a search, where the search gives options. They are not refused,
                either, if a file is the config.yaml of a former run, which has all options.

        Raises:
            UsageError: naming an unknown key, a wrong value, or anything else that RecBole's Config
                refuses.
        """
        self.strict = strict
        self._call_options = dict(config_dict or {})

        # filled in later:
        self._dataset_options: dict[str, Any] = {}  # options in the yaml file of the dataset
        self.public: dict[str, Any] = {}  # facts there, such as the number of users
        self.asked_for: set[str] = set()  # options that a model has read and that do not exist
        self.reasons: list[str] = []  # which defaults the size of the data has changed
        try:
            self._build(model, dataset, config_file_list or [])
        except PosError:  # one of this package, a ValueError or not, has its message already
            raise
        # RecBole raises these for options that it refuses.
        except (ValueError, TypeError, LookupError, RuntimeError) as error:
            raise UsageError(f"configuration: {error.args[0] if error.args else error}") from error

    def _build(self, model: str | type | None, dataset: str | None, files: list[str]) -> None:
        """Do what RecBole's ``Config.__init__`` does, with the plugin's sources and checks.

        RecBole's own, which is not called, would read options from ``sys.argv``, and evaluate text
        as Python. Its methods are called one by one instead. RecBole calls defaults
        ``internal_config_dict``, options that are given ``external_config_dict``, and both together
        ``final_config_dict``.

        Args:
            model: name or class of the model; None to read it from a file.
            dataset: name of the dataset; None to read it from a file.
            files: paths of config files, or names of presets. ``self._call_options``, the options
                of the call, win over those of files.
        """
        # Read the files.
        self.compatibility_settings()
        self._init_parameters_category()
        self.yaml_loader = PackagedLoader  # of RecBole's own files
        paths = [(file, sources.find_config_file(file)) for file in files]
        self.files: list[tuple[str | Path, dict[str, Any]]] = [
            (file, read_yaml(path)) for file, path in paths
        ]
        # The presets of this package are below ROOT.
        self.own_files = [str(file) for file, path in paths if not path.is_relative_to(ROOT)]
        vectors = self._call_options.get("item_vectors")
        if vectors is not None:  # content vectors of items in memory become a file
            self._call_options["item_vectors"] = to_file(vectors)

        # Find model and dataset, whose names may stand in a file.
        model_name = models.ensure_registered(model) if isinstance(model, type) else model
        plugins = self._import_plugins(model_name)
        self.model, self.dataset, folder = self._find_names(model_name, dataset)
        if folder is not None:  # the dataset was given as a folder; this is the one around it
            self._call_options["data_path"] = folder
        self._read_dataset_file()

        # Merge the options that are given: files may have some for certain models and position
        # schemes only. Keep which file gave each option, for messages.
        position = self._merge_user_options(self.model).get("position")
        schemes = sources.list_positions(position, self.model)
        self.external_config_dict = self._merge_user_options(self.model, *schemes)
        self.sources = {
            key: location
            for location, options in self._list_parts(self.model, *schemes)
            for key in options
            if key not in self._call_options
        }

        # Keep the modules that register the model, schemes and metrics, for readers of this run.
        self.model_class = self._find_class()
        metrics = self.external_config_dict.get("metrics")
        modules = list(dict.fromkeys([*plugins, *find_modules(self.model, schemes, metrics)]))
        if modules:
            self.external_config_dict[PLUGINS] = modules

        # Read the defaults; plug.py adds the plugin's for the models that it serves to RecBole.
        self._load_internal_config_dict(self.model, self.model_class, self.dataset)
        if not models.is_served(self.model):
            position = self.external_config_dict.get("position")
            self.internal_config_dict.update(sources.plugin_defaults(self.model, position))

        # Check the options, and merge them with the defaults.
        self.strict = self.strict and not self._find_run_files()
        self.free = sources.free_options(self.model, schemes)
        self._check_user_options()
        self.final_config_dict = self._merge_defaults()
        checked = {k: v for k, v in self.final_config_dict.items() if k not in self.free}
        checks.check_together(checked, self.model)
        self.plain = self._make_plain()  # before RecBole derives values such as the device
        if self.strict:
            self._refuse_unread()

        # Let RecBole derive values from them, such as how negatives are sampled (items to contrast
        # with the target). A model that only counts needs none; ``plain`` keeps the option as it
        # was given, since the names of runs are made of it.
        self._set_default_parameters()
        self._init_device()
        if models.is_untrained(self.model):
            self.final_config_dict["train_neg_sample_args"] = None
        self._set_train_neg_sample_args()
        checks.check_negatives(self.final_config_dict, self.model)
        self._set_eval_neg_sample_args("valid")
        self._set_eval_neg_sample_args("test")

    def __getitem__(self, key: str) -> Any:
        """Return an option's value; for an unknown one None, as in RecBole, and note its name."""
        final = self.__dict__.get("final_config_dict", {})  # it is missing while options are read
        if key not in final:
            self.asked_for.add(key)
        return final.get(key)

    # --- where options come from ---

    def _import_plugins(self, model: str | None) -> list[str]:
        """Import the modules that config files or the call name under ``plugins``.

        Such a module registers models and position schemes of the user's when it is imported. They
        can then be looked up by name. If a module has a class with the name of the run's model and
        does not register it, it is registered here.

        Args:
            model: name of the model in the call; None if it stands in a file.

        Returns:
            Names of the modules.
        """
        # Pairs of a place, for messages, and the options that are given there.
        sources_of_options = [*self.files, (_NO_FILE, self._call_options)]
        modules: list[str] = []
        for place, options in sources_of_options:
            modules += import_plugins(options.get(PLUGINS), str(place))

        for name in [model, *(options.get("model") for _, options in sources_of_options)]:
            if name:
                register_class(str(name), modules)  # if one of the modules has a class of the name
        return modules

    def _list_parts(self, *names: str) -> list[tuple[str, dict[str, Any]]]:
        """Return the parts of all config files whose options this run takes.

        A file has options for every run and, under ``for``, options for runs with a certain model
        or position scheme, such as ``for: {SASRec: {n_heads: 1}}``.

        Args:
            names: the model of the run and its position schemes.

        Returns:
            (place in a file, options) of each part; later ones win over earlier ones.
        """
        parts = []
        for file, content in self.files:
            parts += sources.select_parts(content, names, file)
        return parts

    def _merge_user_options(self, *names: str) -> dict[str, Any]:
        """Return option -> value, of all options that files and the call give, without defaults.

        Later files win over earlier ones, and the call (``self._call_options``) wins over files.

        Args:
            names: the model of the run and its schemes, as far as known: see :meth:`_list_parts`.
        """
        merged: dict[str, Any] = {}
        for _, options in self._list_parts(*names):
            merged = sources.merge_options(merged, options)
        return sources.merge_options(merged, self._call_options)

    def _find_names(self, model: str | None, dataset: str | None) -> tuple[str, str, str | None]:
        """Return the names of model and dataset, from the call or else from the files.

        Args:
            model: name of the model in the call, if it has one.
            dataset: name of the dataset in the call, or its folder; it may be missing, too.

        Returns:
            The name of the model, that of the dataset and, for a dataset that is given as a folder,
            the folder around it, else None: ``data/shop`` gives the name ``shop`` and ``data``.

        Raises:
            UsageError: if one is given nowhere.
        """
        options = self._merge_user_options()  # of files and the call, for all models
        model = model or options.get("model")
        dataset = dataset or options.get("dataset")
        if not model or not dataset:
            missing = "model (-m)" if not model else "dataset (-d)"
            raise UsageError(f"no {missing} given, on the command line or in a config file")

        # Datasets are looked for below ``data_path``. A file may give that for this model only, so
        # options are merged again, now with those for the model.
        options = self._merge_user_options(str(model))
        name, parent = locate_dataset(str(dataset), str(options.get("data_path") or "dataset/"))
        return str(model), name, parent

    def _read_dataset_file(self) -> None:
        """Read ``<dataset>.yaml`` in the dataset's folder, as a config file of lowest priority.

        Its options are put before those of all other files in ``self.files``. Under ``public`` it
        may have facts on a public dataset, such as its number of users; they are no options, and go
        to ``self.public``. Nothing happens if there is no such file.

        Raises:
            UsageError: if the file names plugins. A dataset may come from a stranger, and must not
                have code imported.
        """
        # The folder of datasets: an option of the call, or of a file, maybe for this model only.
        folder = Path(str(self._merge_user_options(self.model).get("data_path", "dataset/")))
        file = folder / self.dataset / f"{self.dataset}.yaml"
        if not file.is_file():
            return
        options = read_yaml(file)
        self.public = options.pop("public", None) or {}
        if PLUGINS in options:
            raise UsageError(f"{file}: {PLUGINS} belong to a run, and not to a dataset")
        self._dataset_options = options
        self.files.insert(0, (file, options))

    def _find_class(self) -> type:
        """Return the class of the model ``self.model``: of this package, RecBole, or the user.

        Raises:
            UsageError: if there is no such model; the message names the file that asks for it.
        """
        if self.model in models.MODELS:  # the models of this package and of users
            return models.MODELS[self.model]
        if self.model in models.RECBOLE:  # those of RecBole's that can be run
            return get_model(self.model)
        location = f"{self.sources['model']}: " if "model" in self.sources else ""
        raise UsageError(location + models.explain_unknown(self.model))

    def _merge_defaults(self) -> dict[str, Any]:
        """Return option -> value, of all options: what is given, and the defaults of the others.

        Five defaults depend on other options: ``sce_above``, ``short_histories``,
        ``train_neg_sample_args``, ``train_batch_size`` and ``load_col``, in this order below.
        """
        defaults, given = self.internal_config_dict, self.external_config_dict
        final = {**defaults, **given}
        final["eval_args"] = {**defaults["eval_args"], **(given.get("eval_args") or {})}

        # ``sce_above`` is a number of items: for more, the loss SCE takes the place of CE. It is
        # meant for the default loss. A loss that the user gives stays: None stands for no limit.
        if "loss_type" in given and "sce_above" not in given:
            final["sce_above"] = None

        # ``short_histories`` are defaults for users with few interactions, see :meth:`adapt`. None
        # of them holds if the user gives one of these options.
        if "short_histories" not in given and given.keys() & defaults.get("short_histories", {}):
            final["short_histories"] = None

        # ``train_neg_sample_args`` says how many negatives (items to contrast with the target) are
        # sampled. RecBole's default is one. Cross-entropy (CE) compares the target with all items,
        # and takes None.
        is_sequential = final["MODEL_TYPE"] == ModelType.SEQUENTIAL
        has_all_items = is_sequential and final.get("loss_type") == "CE"
        if has_all_items and "train_neg_sample_args" not in given:
            final["train_neg_sample_args"] = None

        # ``train_batch_size`` is the number of rows of a batch, by RecBole's default 2,048. A row
        # has one target. With ``augmentation: all_positions``, RecBole's causal models
        # (CAUSAL_BUILTINS, such as SASRec) get rows with a whole history and a target at each of
        # its positions. So they get fewer of them, 128.
        has_windows = final["augmentation"] == "all_positions"
        if self.model in models.CAUSAL_BUILTINS and has_windows and "train_batch_size" not in given:
            final["train_batch_size"] = _WINDOWS_PER_BATCH

        # ``load_col`` lists the columns to read: by default user, item and, added here, the time.
        final["load_col"] = sources.add_time_field(final.get("load_col"), final)
        return final

    def _set_default_parameters(self) -> None:
        """Let RecBole derive values of options from others, then replace two of them.

        - ``data_path`` becomes the folder of the dataset, see :meth:`_find_dataset_folder`. RecBole
          would take the dataset ml-100k of its installed package, whatever the user has.
        - ``gpu_id`` becomes empty if ``use_gpu`` is False. RecBole looks at ``gpu_id`` only.
        """
        options = self.final_config_dict
        folder = self._find_dataset_folder(str(options["data_path"]))
        super()._set_default_parameters()
        options["data_path"] = str(folder)
        if not options["use_gpu"]:
            options["gpu_id"] = ""

    def _find_dataset_folder(self, data_path: str) -> Path:
        """Return the folder of the dataset: the user's in ``data_path``, or RecBole's.

        RecBole's installed package has the dataset ml-100k. It is taken if the user has no file of
        interactions of this name, and names no files of parts (``benchmark_filename``).
        """
        # WHEEL_DATASETS is the folder of the datasets in RecBole's package. ``find_atomic_file``
        # gives the path of the file of interactions, which need not exist.
        own, recboles = Path(data_path) / self.dataset, WHEEL_DATASETS / self.dataset
        if self.final_config_dict["benchmark_filename"]:
            return own
        has_own = find_atomic_file(own, self.dataset, "inter").is_file()
        has_recboles = find_atomic_file(recboles, self.dataset, "inter").is_file()
        return recboles if has_recboles and not has_own else own

    def adapt(self, counts: Mapping[str, int]) -> None:
        """Change the defaults that depend on the size of the data, which are read later.

        Args:
            counts: numbers of ``users``, ``items`` and ``events`` (interactions).
        """
        self._adapt_loss(counts["items"])
        # Defaults of some models for users with fewer interactions than ``short_below``. They are
        # used once: whoever changes the run's config.yaml and runs it again gets what it says.
        if short_histories := self["short_histories"]:
            mean = counts["events"] / counts["users"]
            values = short_histories if mean < self["short_below"] else {}
            self._change({**values, "short_histories": None})
            changes = ", ".join(f"{key} {value}" for key, value in values.items())
            self.reasons += [f"{changes} for {mean:.1f} interactions a user"] if changes else []

    def _change(self, values: dict[str, Any]) -> None:
        """Change options in what the run reads and in what is written to its config.yaml."""
        for options in (self.final_config_dict, self.plain):
            options.update(values)

    def _adapt_loss(self, num_items: int) -> None:
        """Replace the default loss, CE, by SCE if there are more items than ``sce_above``.

        CE scores all items at every position of a batch, which takes long for many items; SCE
        scores only some. CE stays if SCE cannot take its place:

        - SCE is a loss of this package, which only models on its base class can have.
        - ``compile``, which makes a training step one graph, and ``target_window``, by which a
          state has several targets, are for CE only.
        - A model with the option ``prior_weight`` (AttrFormer) changes the cross-entropy itself.

        Args:
            num_items: number of items of the dataset, which is read after the configuration.
        """
        limit = self["sce_above"]
        needs_ce = self["compile"] or self["target_window"] > 1 or "prior_weight" in self
        has_ce = self["loss_type"] == "CE" and models.is_on_our_base(self.model)
        if limit is None or num_items <= limit or not has_ce or needs_ce:
            return

        defaults = read_properties("loss", "SCE").defaults  # of the options of the new loss
        self.internal_config_dict.update(defaults)  # RecBole's name for all defaults
        self._change({**defaults, "loss_type": "SCE"})
        self.reasons.append(f"loss SCE instead of CE for more than {limit:,} items (sce_above)")

    # --- checks ---

    def _check_user_options(self) -> None:
        """Check names and values of the options that files and the call give.

        The table of options has a row for each option, with type and bounds of its values. A value
        is checked by it and converted to the type: a learning rate of 1 becomes the float 1.0.

        Raises:
            UsageError: naming the file and the option.
        """
        # RecBole's names for defaults and for the options that are given.
        defaults, options = self.internal_config_dict, self.external_config_dict
        # Names that may be given: all options with a default, but not what RecBole computes and
        # keeps among them (DERIVED_KEYS); and ``model``, ``dataset`` and ``plugins``.
        known = {*defaults, *EXTRA_KEYS, PLUGINS} - DERIVED_KEYS
        for key, value in options.items():
            location = self.sources.get(key, _NO_FILE)  # the file that gave it, if one did
            self._require_known(key, location, known)

            # ``free`` are options of the user's own model or schemes. The table does not know them,
            # even if it has an option of this name. They get a row that only checks whether the
            # value has the type of the default.
            row = option_table.OPTIONS.get(key)
            if row is None or key in self.free:
                row = option_table.make_custom_option(key, defaults.get(key))

            # ``refused`` is why an option of RecBole's has no effect here, and empty for others.
            # Such an option may only have its default.
            if row.refused and value != defaults[key]:
                raise UsageError(f"{location}: {key}: {row.refused}")
            options[key] = checks.check_value(location, row, value)

    def _require_known(self, key: str, location: str, known: set[str]) -> None:
        """Raise an UnknownKey for a key that no option of this run has, and say what was meant.

        Args:
            key: the key.
            location: file that gave it, or "configuration".
            known: names of all options of this run.
        """
        if key in known:
            return

        readers = sources.describe_readers(key)  # a text, such as "it is read by FPARec"
        synonyms = [name for name in option_table.find_synonyms(str(key)) if name in known]
        if synonyms:  # options of this run that other libraries call by this name
            advice = f"; here it is {' and '.join(synonyms)}"
        elif readers:  # an option of other models, losses or position schemes
            advice = f"; {readers}"
        else:  # it may be misspelt: name the options that are written alike
            advice = nearest(str(key), known)
        if self.model in models.MODELS.added:
            advice += "; declare it by recbole_pos.register_model(..., defaults={...})"
        raise UnknownKey(
            f"{location}: unknown key {shown(key)}. {self.model} on {self.dataset} does not "
            f"read it{advice}",
            key,
        )

    def _find_run_files(self) -> list[str]:
        """Return those of the config files that are the config.yaml of a former run.

        A run writes every option into its config.yaml, and a person only some into a file. So a
        file with more than half of all options is taken for that of a run. ``self.files`` has pairs
        of a file and its options.
        """
        defaults = self.internal_config_dict
        counts = {str(file): len(defaults.keys() & content) for file, content in self.files}
        return [file for file, count in counts.items() if count > len(defaults) / 2]

    def _make_plain(self) -> dict[str, Any]:
        """Return option -> plain value, of all options, by which this run can be repeated.

        Plain values are what yaml can hold: numbers, text, lists and mappings. Paths are absolute,
        so that the run can be repeated from another working directory.
        """
        # Options in _NOT_KEPT are left out: RecBole computes them, or they have no effect here.
        final = self.final_config_dict
        plain = to_plain({key: value for key, value in final.items() if key not in _NOT_KEPT})
        plain.update(model=self.model, dataset=self.dataset)
        # A file, and STARTS, the folders of runs to start from; ``make_absolute`` keeps None.
        for key in ("item_vectors", *STARTS):
            plain[key] = make_absolute(plain[key])
        base = Path(str(final["data_path"]))
        if (base / self.dataset).is_dir():  # else the dataset is found in the installed RecBole
            plain["data_path"] = str(base.resolve())
        return plain

    def _refuse_unread(self) -> None:
        """Raise an UnknownKey for an option that the user has set although it has no effect here.

        An example is ``fusion`` with a position scheme that fuses nothing. Options with their
        default are not refused, nor those from places that are written for several models, such as
        a preset (:meth:`_is_set_by_user`).
        """
        # All values of this run, and their defaults. ``flatten_options`` adds the keys of mappings
        # as options of their own, such as ``eval_args.target``.
        values = option_table.flatten_options(self.plain)
        defaults = option_table.flatten_options(self.internal_config_dict)
        # If ``mask_history`` is None, the model decides. Conditions of other options ask for it.
        values["mask_history"] = masks_history(self.final_config_dict)
        for name, value in values.items():
            key, *_ = name.split(".")  # eval_args for eval_args.target
            is_default = value in (None, defaults.get(name))
            # ``free`` are options of the user's own classes, of which the package knows nothing
            if is_default or key in self.free or not self._is_set_by_user(key):
                continue
            reason = sources.explain_unread(name, values, self.model, defaults["MODEL_TYPE"])
            if reason is None:  # it has an effect
                continue
            location, advice = self.sources.get(key, _NO_FILE), "leave it out"
            if location != _NO_FILE:  # a file gave it, and not the call
                advice += ", or put it under `for` with the models that read it"
            raise UnknownKey(
                f"{location}: {name} is not read by {self.model}{reason}; {advice}", key
            )

    def _is_set_by_user(self, key: str) -> bool:
        """Return whether the user has set an option for this run: in the call or a file of theirs.

        The yaml file of the dataset, a preset of this package and a part of a file under ``for``
        are written for several models. What they give does not count as set for this run.

        Args:
            key: name of the option.
        """
        if key not in self.external_config_dict:  # all that files and the call give
            return False
        if key not in self.sources:  # all that files give; so the call gives it
            return True
        # The place that gave it is a file, such as "a.yaml", or a part, "a.yaml, for SASRec".
        return self.sources[key] in self.own_files

    @property
    def expected_counts(self) -> dict[str, int]:
        """Numbers that a public dataset must have, such as ``{"users": 943, "items": 1682}``.

        They stand in the dataset's yaml (``self.public``), and are empty for a dataset that is not
        public. FILTERS are the options that leave out interactions, such as those of users with
        few. If this run filters in another way than the yaml, the numbers are unknown, and empty.
        """
        dataset_filters = {**self.internal_config_dict, **self._dataset_options}  # of the yaml
        is_unchanged = all(self[option] == dataset_filters.get(option) for option in FILTERS)
        return self.public.get("counts", {}) if is_unchanged else {}


def to_plain_options(config: Config) -> dict[str, Any]:
    """Return the options of a run as a mapping that can be kept in a file and repeats the run.

    ``PosConfig(config_dict=...)`` of the mapping is the same configuration. Its values are plain:
    numbers, texts, None, and lists and mappings of such.

    Args:
        config: a PosConfig, which has kept them in this form, or a Config of RecBole's.
    """
    if isinstance(config, PosConfig):
        return config.plain

    # Take the value that the user has given to each option, or else its default. Left out are
    # options that RecBole computes, and those that have no effect in this package (_NOT_KEPT).
    defaults, given = config.internal_config_dict, config.external_config_dict
    plain = {key: given.get(key, defaults[key]) for key in defaults if key not in _NOT_KEPT}
    plain |= {"model": config["model"], "dataset": config["dataset"]}
    # The user gives as ``data_path`` the folder that holds the folder of the dataset. RecBole has
    # replaced it by the folder of the dataset.
    plain["data_path"] = str(Path(config["data_path"]).resolve().parent)

    if "short_histories" in plain:  # no defaults by the data, which RecBole's functions do not know
        plain["short_histories"] = None

    # The option ``plugins`` names the modules of the user's own model and position schemes, which
    # must be imported before these are known; models and schemes of packages have none.
    schemes = sources.list_positions(plain.get("position"), config["model"])
    modules = find_modules(config["model"], schemes)
    if modules:
        plain[PLUGINS] = modules
    return to_plain(plain)  # numpy's numbers, which a user may have given, become Python's
