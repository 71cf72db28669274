//! Names of request fields, tools and input items that are accepted but have no effect on the reply. They are
//! listed in the reply header `x-hadron-ignored-fields` and counted in a metric. `--strict-fields` does not
//! reject them.

use std::cell::RefCell;
use std::rc::Rc;

/// Maximum number of names in the reply header. Further names are counted but not listed.
const NAMES_MAX: usize = 32;

/// Names of the parts of one request (fields, tools, input items) that have no effect on the reply. Clones
/// share one list, so that all objects of a request body add to it.
#[derive(Debug, Default, Clone)]
pub(crate) struct IgnoredRequestParts {
    list: Rc<RefCell<IgnoredPartList>>,
}

/// List of names, and the number of parts including those that are not listed.
#[derive(Debug, Default)]
struct IgnoredPartList {
    names: Vec<String>,
    count: usize,
}

impl IgnoredRequestParts {
    /// Adds the path of a field, a tool or an input item that has no effect. The path must be printable
    /// ASCII.
    pub(crate) fn add(&self, name: impl Into<String>) {
        self.add_with(|| name.into());
    }

    /// Adds the path that `name` returns; `name` is not called if the list is full.
    pub(crate) fn add_with(&self, name: impl FnOnce() -> String) {
        let mut list = self.list.borrow_mut();
        list.count += 1;
        if list.names.len() < NAMES_MAX {
            list.names.push(name());
        }
    }

    /// Returns the number of added names.
    pub(crate) fn count(&self) -> usize {
        self.list.borrow().count
    }

    /// Returns the names to list in the reply header (at most `NAMES_MAX`).
    pub(crate) fn names(&self) -> Vec<String> {
        self.list.borrow().names.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_counted_and_few_are_listed() {
        let hints = IgnoredRequestParts::default();
        for index in 0..100 {
            hints.clone().add(format!("tools[{index}]"));
        }
        assert_eq!((hints.count(), hints.names().len()), (100, NAMES_MAX));
    }
}
