"""The earlier place of chat templates, from which scripts of users import them."""

from lm.data.templates import Template, TemplateFailure

__all__ = ['Template', 'TemplateFailure']
