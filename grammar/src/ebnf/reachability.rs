//! Determines which rules a grammar needs, and which rules can be terminals.

use super::{EbnfGrammar, EbnfNode};

/// Properties of each rule that follow from the references between rules.
pub(super) struct RuleReachability {
    /// For each rule: whether the root refers to it, directly or indirectly.
    pub(super) is_needed: Vec<bool>,
    /// For each rule: whether it refers to no recursive rule, so that it can be a terminal.
    pub(super) is_terminal: Vec<bool>,
}

impl RuleReachability {
    pub(super) fn of(grammar: &EbnfGrammar) -> Self {
        let references: Vec<Vec<usize>> = grammar.bodies.iter().map(references).collect();
        let reached: Vec<Vec<bool>> =
            (0..references.len()).map(|rule| reachable(rule, &references)).collect();
        let is_recursive: Vec<bool> =
            reached.iter().enumerate().map(|(rule, reached)| reached[rule]).collect();
        let is_terminal = |reached: &Vec<bool>| {
            !reached
                .iter()
                .zip(&is_recursive)
                .any(|(is_reached, recursive)| *is_reached && *recursive)
        };
        let mut is_needed = reached[grammar.root].clone();
        is_needed[grammar.root] = true;
        Self { is_needed, is_terminal: reached.iter().map(is_terminal).collect() }
    }
}

/// Returns, for each rule, whether `rule` refers to it directly or indirectly.
fn reachable(rule: usize, references: &[Vec<usize>]) -> Vec<bool> {
    let mut reached = vec![false; references.len()];
    let mut pending = vec![rule];
    while let Some(next) = pending.pop() {
        for &reference in &references[next] {
            if !std::mem::replace(&mut reached[reference], true) {
                pending.push(reference);
            }
        }
    }
    reached
}

fn references(node: &EbnfNode) -> Vec<usize> {
    match node {
        EbnfNode::Text(_) | EbnfNode::Regex(_) => Vec::new(),
        EbnfNode::Rule(rule) => vec![*rule],
        EbnfNode::Sequence(nodes) | EbnfNode::Choice(nodes) => {
            let mut all: Vec<usize> = nodes.iter().flat_map(references).collect();
            all.sort_unstable();
            all.dedup();
            all
        }
        EbnfNode::Repeat(repeat) => references(&repeat.node),
    }
}
