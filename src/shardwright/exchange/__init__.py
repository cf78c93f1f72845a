"""Other engines' configurations: read into one record, planned and priced like any plan, and written from plans.

One file per format. What a file says and a plan cannot do, or the other way round, is listed with what it costs.
"""

from shardwright.exchange.configuration import Configuration, ConfigurationError, Remark
from shardwright.exchange.exporting import Export, export
from shardwright.exchange.reading import read_configuration

__all__ = ["Configuration", "ConfigurationError", "Export", "Remark", "export", "read_configuration"]
