//! The trial of a grammar: it is compiled, and some of its texts are followed, in a process of its own, before this
//! one touches it.
//!
//! No limit of the compiler bounds everything that it does, a thread cannot be stopped, and memory that a thread
//! takes is everybody's. A process can be killed. So each grammar is first tried in a child that leaves the
//! processor to others, with bounded memory: if it is not done in time, the child is killed and the grammar
//! refused. What has passed is compiled here again, by the same code, at a cost that is known by then: a compiled
//! grammar is a web of tables that grow as it is followed, with no form to send it in.
//!
//! The child is this binary as `hadron grammar-worker`. Its standard input is a socket on which it gets the
//! vocabulary once, then grammars, one at a time, each answered before the next. It knows no tokenizer: it spells
//! text without a choice in it with the longest tokens that fit.

mod child;
mod message;
mod process;
mod starvation_watchdog;

pub use child::serve;
pub(super) use message::vocabulary_frame;
pub(super) use process::GrammarWorkerProcess;
