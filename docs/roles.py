"""The role and the directive of Sphinx that draw equations (docs/equations.py)."""

from docutils import nodes
from sphinx.util.docutils import SphinxDirective, SphinxRole

from docs.equations import to_mathml
from eval.console.docstrings import is_equation


class EquationRole(SphinxRole):
    """An equation in a line. An error of its notation is an error of the page."""

    def run(self):
        try:
            return [nodes.raw('', to_mathml(self.text), format='html')], []
        except ValueError as error:
            message = self.inliner.reporter.error(str(error), line=self.lineno)
            return [self.inliner.problematic(self.rawtext, self.rawtext, message)], [message]


class DocstringRole(EquationRole):
    """Text in single backticks of a docstring: an equation or code."""

    def run(self):
        if is_equation(self.text):
            return super().run()
        return [nodes.literal(self.rawtext, self.text)], []


class EquationDirective(SphinxDirective):
    """Equations on lines of their own, one in each line of the content."""

    has_content = True

    def run(self):
        try:
            lines = [to_mathml(line.strip(), display=True) for line in self.content if line.strip()]
        except ValueError as error:
            raise self.error(str(error)) from error
        html = '\n'.join(f'<div class="equation">{line}</div>' for line in lines)
        return [nodes.raw('', html, format='html')]


def setup(app) -> None:
    """Adds the roles and the directive; conf.py makes `docstring` the role of single backticks."""
    app.add_role('equation', EquationRole())
    app.add_role('docstring', DocstringRole())
    app.add_directive('equation', EquationDirective)
