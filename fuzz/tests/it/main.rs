//! Every target: its corpus, seeded inputs, and whether the engine can find what is wrong at all.

use codex_fuzz::{Engine, TARGETS, Target};

/// Inputs for each target. `cargo xtask fuzz` makes more.
const INPUTS: usize = 1500;

#[test]
fn every_target_keeps_its_promises_for_seeded_inputs() {
    for &target in TARGETS {
        let mut engine = Engine::for_target(target, 16).unwrap();
        let checked = engine.check_corpus().and_then(|()| engine.run(INPUTS));
        if let Err(failure) = checked {
            let input = String::from_utf8_lossy(&failure.input);
            panic!("{}: {}: {input:?}", target.name, failure.message);
        }
        assert!(engine.kinds() > 1, "{}: every input has the same outcome", target.name);
    }
}

#[test]
fn every_target_has_a_corpus_and_a_libfuzzer_program() {
    let manifest = include_str!("../../coverage/Cargo.toml");
    for target in TARGETS {
        assert!(target.corpus().read_dir().unwrap().next().is_some(), "{}", target.name);
        assert!(manifest.contains(&format!("name = \"{}\"", target.name)), "{}", target.name);
    }
    assert_eq!(manifest.matches("[[bin]]").count(), TARGETS.len());
}

/// A parser with a mistake that needs three steps: the engine finds it, shortens it, and finds it again.
#[test]
fn engine_finds_a_planted_mistake_and_shortens_it() {
    fn planted(input: &[u8]) -> u64 {
        let text = String::from_utf8_lossy(input);
        let number = text.split("len=").nth(1).and_then(|rest| rest.split(';').next());
        match number.map(str::parse::<u16>) {
            Some(Ok(number)) => {
                assert!(number < 40_000, "too long");
                1
            }
            Some(Err(_)) => 2,
            None => 0,
        }
    }
    let target = Target { name: "planted", check: planted };
    let find = |seed| {
        let corpus = vec![b"name=a;len=10;".to_vec(), b"something else".to_vec()];
        Engine::new(target, corpus, seed).run(200_000).unwrap_err()
    };
    let failure = find(1);
    assert_eq!(failure.message, "too long");
    assert!(failure.input.starts_with(b"len=") && failure.input.len() <= 9, "{failure:?}");
    assert_eq!(find(1).input, failure.input, "the seed decides");
}
