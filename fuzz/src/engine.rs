//! The engine: seeded, without threads, and without a clock of its own.

use std::any::Any;
use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};

use fastrand::Rng;

use crate::Target;
use crate::mutation::{MAX_LEN, mutate};

/// The most inputs that are kept as parents.
const MAX_PARENTS: usize = 4096;

/// A broken promise.
#[derive(Debug)]
pub struct Failure {
    /// What breaks it, as short as could be found.
    pub input: Vec<u8>,
    /// What the target said.
    pub message: String,
}

/// Makes inputs for one target and checks them.
#[derive(Debug)]
pub struct Engine {
    target: Target,
    rng: Rng,
    parents: Vec<Vec<u8>>,
    words: Vec<Vec<u8>>,
    /// The kinds of outcome seen, with the rough length of their input.
    seen: HashSet<(u64, u32)>,
}

impl Engine {
    /// An engine that begins with these inputs.
    pub fn new(target: Target, corpus: Vec<Vec<u8>>, seed: u64) -> Self {
        let words = corpus.iter().flat_map(|input| words(input)).collect::<HashSet<_>>();
        let mut words: Vec<_> = words.into_iter().collect();
        // The order of a set is not the seed's.
        words.sort();
        let parents = if corpus.is_empty() { vec![Vec::new()] } else { corpus };
        Self { target, rng: Rng::with_seed(seed), parents, words, seen: HashSet::new() }
    }

    /// An engine for a target with the files of its corpus.
    pub fn for_target(target: Target, seed: u64) -> std::io::Result<Self> {
        let mut files: Vec<_> =
            std::fs::read_dir(target.corpus())?.collect::<std::io::Result<_>>()?;
        files.sort_by_key(std::fs::DirEntry::file_name);
        let inputs = files.iter().map(|file| std::fs::read(file.path()));
        Ok(Self::new(target, inputs.collect::<std::io::Result<_>>()?, seed))
    }

    /// Checks every input of the corpus as it is.
    pub fn check_corpus(&mut self) -> Result<(), Failure> {
        for input in self.parents.clone() {
            self.check(&input)?;
        }
        Ok(())
    }

    /// How many kinds of outcome were seen.
    pub fn kinds(&self) -> usize {
        self.seen.iter().map(|(kind, _)| kind).collect::<HashSet<_>>().len()
    }

    /// Makes and checks `count` inputs.
    pub fn run(&mut self, count: usize) -> Result<(), Failure> {
        for _ in 0..count {
            let (one, other) = (self.parent(), self.parent());
            let (one, other) = (&self.parents[one], &self.parents[other]);
            let input = mutate(&mut self.rng, one, other, &self.words);
            self.check(&input)?;
        }
        Ok(())
    }

    /// A parent: of the corpus or, as often, of what was found.
    fn parent(&mut self) -> usize {
        self.rng.usize(..self.parents.len())
    }

    fn check(&mut self, input: &[u8]) -> Result<(), Failure> {
        match outcome(self.target, input) {
            Ok(kind) => {
                let is_new = self.seen.insert((kind, input.len().max(1).ilog2()));
                if is_new && self.parents.len() < MAX_PARENTS && input.len() < MAX_LEN {
                    self.parents.push(input.to_vec());
                }
                Ok(())
            }
            Err(_) => {
                let input = shorten(self.target, input.to_vec());
                let message = outcome(self.target, &input).err().unwrap_or_default();
                Err(Failure { input, message })
            }
        }
    }
}

fn outcome(target: Target, input: &[u8]) -> Result<u64, String> {
    catch_unwind(AssertUnwindSafe(|| (target.check)(input))).map_err(|panic| text(&*panic))
}

fn text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string)).unwrap_or_default()
}

/// Drops parts of a failing input while it keeps failing.
fn shorten(target: Target, mut input: Vec<u8>) -> Vec<u8> {
    let mut part = input.len() / 2;
    while part > 0 {
        let mut at = 0;
        while at < input.len() {
            let mut shorter = input.clone();
            shorter.drain(at..(at + part).min(input.len()));
            match outcome(target, &shorter) {
                Err(_) => input = shorter,
                Ok(_) => at += part,
            }
        }
        part /= 2;
    }
    input
}

/// The words of an input: runs of letters and digits, and quoted names.
fn words(input: &[u8]) -> impl Iterator<Item = Vec<u8>> {
    let runs = input.split(|byte| !byte.is_ascii_alphanumeric() && !b"_-/*@:".contains(byte));
    runs.filter(|run| (2..=40).contains(&run.len())).map(<[u8]>::to_vec)
}
