//! Writes an EBNF grammar as Lark rules and terminals.

use super::reachability::RuleReachability;
use super::{EbnfGrammar, EbnfNode, EbnfRepeat};
use crate::lark_text::literal;
use crate::structural_tag::{LarkExpression, TagGrammarWriter};

impl TagGrammarWriter {
    /// Adds the rules of a grammar and returns the expression for its root.
    pub(crate) fn ebnf(&mut self, grammar: &EbnfGrammar) -> LarkExpression {
        let RuleReachability { is_needed, is_terminal } = RuleReachability::of(grammar);
        let names: Vec<LarkExpression> = is_terminal
            .iter()
            .map(|&is_terminal| {
                if is_terminal {
                    LarkExpression::Terminal(self.reserve("TEXT"))
                } else {
                    LarkExpression::Rule(self.reserve("part"))
                }
            })
            .collect();
        for (rule, body) in grammar.bodies.iter().enumerate().filter(|(rule, _)| is_needed[*rule]) {
            let body = self.ebnf_node(body, &names);
            match &names[rule] {
                LarkExpression::Terminal(name) => {
                    let LarkExpression::Terminal(body) = body else { continue };
                    self.add(name, &body);
                }
                LarkExpression::Rule(name) => {
                    let body = self.rule_expression(body);
                    self.add(name, &body);
                }
            }
        }
        names[grammar.root].clone()
    }

    fn ebnf_node(&mut self, node: &EbnfNode, names: &[LarkExpression]) -> LarkExpression {
        match node {
            EbnfNode::Text(text) => LarkExpression::Terminal(literal(text)),
            EbnfNode::Regex(regex) => LarkExpression::Terminal(format!("/{regex}/")),
            EbnfNode::Rule(rule) => names[*rule].clone(),
            EbnfNode::Sequence(nodes) => {
                let parts = nodes.iter().map(|node| self.ebnf_node(node, names)).collect();
                self.concatenated(parts)
            }
            EbnfNode::Choice(nodes) => {
                let parts = nodes.iter().map(|node| self.ebnf_node(node, names)).collect();
                self.alternatives(parts)
            }
            EbnfNode::Repeat(repeat) => {
                let EbnfRepeat { node, min, max } = &**repeat;
                self.ebnf_node(node, names).repeated(*min, *max)
            }
        }
    }
}
