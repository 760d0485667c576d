"""The names of the laboratory: type checkers read this file, and ``__init__.py`` loads each name on first use."""

from flashgen.lab.bench.grid import cases as cases
from flashgen.lab.bench.on_gpu import time_algorithms as time_algorithms
from flashgen.lab.bench.timings import Timings as Timings
from flashgen.lab.estimator import Estimate as Estimate
from flashgen.lab.estimator import estimate as estimate
from flashgen.lab.io.count import IOCount as IOCount
from flashgen.lab.io.count import count_io as count_io
from flashgen.lab.io.model import io_model as io_model
from flashgen.lab.io.result import IOModel as IOModel
from flashgen.lab.io.traffic import AlgorithmIO as AlgorithmIO
from flashgen.lab.io.traffic import KernelIO as KernelIO
from flashgen.lab.memory import Memory as Memory
from flashgen.lab.memory import memory as memory
from flashgen.lab.page.html import html_page as html_page
from flashgen.lab.page.measurements import Bench as Bench
from flashgen.lab.page.measurements import Roofline as Roofline
from flashgen.lab.page.measurements import read_bench as read_bench
from flashgen.lab.page.measurements import read_roofline as read_roofline
from flashgen.lab.roofline.measure import measure_roofline as measure_roofline
