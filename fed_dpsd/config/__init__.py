"""The configuration: the schema of an experiment, and the composition of conf/ with overrides.

PUBLIC: knows keys and values, never data. Imports a class that a message names only from FedDPSD,
or from a plug-in that the run and, in a deployment, the hospital's own file name (plugins.py).
"""

from fed_dpsd.config.schema import BUNDLED as BUNDLED
from fed_dpsd.config.schema import LARGEST_SHIFT as LARGEST_SHIFT
from fed_dpsd.config.schema import LARGEST_SIDE as LARGEST_SIDE
from fed_dpsd.config.schema import MOST_CLIENTS as MOST_CLIENTS
from fed_dpsd.config.schema import MOST_THREADS as MOST_THREADS
from fed_dpsd.config.schema import STRICT as STRICT
from fed_dpsd.config.schema import Config as Config
from fed_dpsd.config.schema import DataConfig as DataConfig
from fed_dpsd.config.schema import Device as Device
from fed_dpsd.config.schema import FederationConfig as FederationConfig
from fed_dpsd.config.schema import Fit as Fit
from fed_dpsd.config.schema import Fraction as Fraction
from fed_dpsd.config.schema import ModelConfig as ModelConfig
from fed_dpsd.config.schema import Positive as Positive
from fed_dpsd.config.schema import Precision as Precision
from fed_dpsd.config.schema import PrivacyConfig as PrivacyConfig
from fed_dpsd.config.schema import Shift as Shift
from fed_dpsd.config.schema import TeacherConfig as TeacherConfig
from fed_dpsd.config.schema import Window as Window
from fed_dpsd.config.schema import is_function as is_function
from fed_dpsd.config.schema import leaves as leaves
from fed_dpsd.config.schema import require_device as require_device
from fed_dpsd.config.schema import to_json as to_json
