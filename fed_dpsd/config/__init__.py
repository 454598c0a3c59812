"""The configuration: the schema of an experiment, and the composition of conf/ with overrides."""

from fed_dpsd.config.schema import (
    BUNDLED,
    Config,
    DataConfig,
    Device,
    FederationConfig,
    ModelConfig,
    PrivacyConfig,
    TeacherConfig,
    require,
    require_positive,
    to_json,
)

__all__ = [
    "BUNDLED",
    "Config",
    "DataConfig",
    "Device",
    "FederationConfig",
    "ModelConfig",
    "PrivacyConfig",
    "TeacherConfig",
    "require",
    "require_positive",
    "to_json",
]
