//! Random terminal programs: text, escape sequences, alternate screens, queries and resizes.

use codex_exec_screen::Screen;
use fastrand::Rng;

/// Seeds per run; `SCREEN_SEED` replays one.
const SEEDS: u64 = 1000;

const SIZES: [(u16, u16); 6] = [(24, 80), (5, 10), (2, 3), (1, 1), (10, 4), (50, 132)];

fn text(rng: &mut Rng) -> Vec<u8> {
    let words =
        ["a", "hello ", "Ä", "漢字", "e\u{301}", "\u{1f600}", "lqqk", "    ", "x\tx", "\u{200d}"];
    (0..rng.usize(1..30)).flat_map(|_| words[rng.usize(..words.len())].bytes()).collect()
}

/// A piece of a program's output. Nothing in it is split or invalid: bytes are cut elsewhere.
fn piece(rng: &mut Rng, rows: u16, cols: u16) -> Vec<u8> {
    let n = |rng: &mut Rng, to: u16| rng.u16(0..to.saturating_add(3));
    let plain = |text: &str| text.as_bytes().to_vec();
    match rng.u32(0..24) {
        0..=5 => text(rng),
        6 => plain("\r\n"),
        7 => plain(["\n", "\r", "\x08", "\t", "\x0b"][rng.usize(..5)]),
        8 => format!("\x1b[{};{}H", n(rng, rows), n(rng, cols)).into_bytes(),
        9 => {
            let end = [
                'A', 'B', 'C', 'D', 'E', 'F', 'G', 'd', '@', 'P', 'X', 'L', 'M', 'S', 'T', 'I', 'Z',
            ][rng.usize(..17)];
            format!("\x1b[{}{end}", n(rng, cols)).into_bytes()
        }
        10 => format!("\x1b[{}{}", rng.u8(0..4), ['J', 'K'][rng.usize(..2)]).into_bytes(),
        11 => {
            let list = [
                "0",
                "1",
                "2",
                "3",
                "4",
                "4:3",
                "5",
                "7",
                "8",
                "9",
                "22",
                "24",
                "27",
                "31",
                "97",
                "42",
                "104",
                "38;5;200",
                "48;2;1;2;3",
                "39",
                "49",
            ];
            format!("\x1b[{}m", list[rng.usize(..list.len())]).into_bytes()
        }
        12 => format!("\x1b[{};{}r", n(rng, rows), n(rng, rows)).into_bytes(),
        13 => {
            let modes = [1, 6, 7, 25, 47, 1000, 1006, 1047, 1048, 1049, 2004, 2026, 1004];
            let set = ['h', 'l'][rng.usize(..2)];
            format!("\x1b[?{}{set}", modes[rng.usize(..modes.len())]).into_bytes()
        }
        14 => {
            format!("\x1b[{}{}", [4, 20][rng.usize(..2)], ['h', 'l'][rng.usize(..2)]).into_bytes()
        }
        15 => plain(["\x1b7", "\x1b8", "\x1b[s", "\x1b[u"][rng.usize(..4)]),
        16 => plain(["\x1bD", "\x1bM", "\x1bE", "\x1bH", "\x1b[g", "\x1b[3g"][rng.usize(..6)]),
        17 => plain(["\x1b(0", "\x1b(B", "\x1b)0", "\x0e", "\x0f"][rng.usize(..5)]),
        18 => query(rng),
        19 => plain(["\x1b=", "\x1b>", "\x1b[3 q", "\x1b[6 q", "\x1b[0 q"][rng.usize(..5)]),
        20 => plain(
            ["\x1b]2;title\x07", "\x1b]0;other\x1b\\", "\x1b]8;;http://x\x07"][rng.usize(..3)],
        ),
        21 => plain(
            ["\x1b[>1u", "\x1b[>5u", "\x1b[<1u", "\x1b[=3;2u", "\x1b[>4;2m", "\x1b[>4m"]
                [rng.usize(..6)],
        ),
        22 if rng.u8(..) < 20 => plain(["\x1bc", "\x1b#8", "\x1b[3J"][rng.usize(..3)]),
        // A repeated character is repainted like any other, but not one that is repeated after the repaint.
        23 => b"xy\x1b[5b".to_vec(),
        _ => text(rng),
    }
}

/// Sequences that a terminal answers.
const QUERIES: [&str; 9] = [
    "\x1b[6n",
    "\x1b[5n",
    "\x1b[c",
    "\x1b[>c",
    "\x1b[?6n",
    "\x1b[18t",
    "\x1b]11;?\x07",
    "\x1b[?2026$p",
    "\x1b[?u",
];

fn query(rng: &mut Rng) -> Vec<u8> {
    QUERIES[rng.usize(..QUERIES.len())].as_bytes().to_vec()
}

fn feed(screens: &mut [&mut Screen], bytes: &[u8]) {
    for screen in screens {
        screen.feed(bytes);
    }
}

fn assert_same(model: &Screen, late: &Screen, seed: u64) {
    assert_eq!(model.text(), late.text(), "seed {seed}");
    if model != late {
        let state = |screen: &Screen| {
            format!("{:?}", screen.state()).replace("wrapped: true", "wrapped: false")
        };
        let (a, b) = (state(model), state(late));
        // The whole state is long: show it around the first difference.
        let at = a.bytes().zip(b.bytes()).position(|(a, b)| a != b).unwrap_or(0);
        let near =
            |text: &str| text.chars().skip(at.saturating_sub(300)).take(500).collect::<String>();
        panic!("seed {seed}:\n{}\n---\n{}", near(&a), near(&b));
    }
}

fn seeds() -> Vec<u64> {
    match std::env::var("SCREEN_SEED").ok().and_then(|seed| seed.parse().ok()) {
        Some(seed) => vec![seed],
        None => (0..SEEDS).collect(),
    }
}

#[test]
fn a_repainted_screen_equals_one_that_was_attached_all_the_time() {
    for seed in seeds() {
        let mut rng = Rng::with_seed(seed);
        let (mut rows, mut cols) = SIZES[rng.usize(..SIZES.len())];
        let mut model = Screen::new(rows, cols);
        // A second terminal, attached at some time.
        let mut late = Screen::new(rows, cols);
        let mut attached = false;
        for _ in 0..rng.usize(1..60) {
            if rng.u8(..) < 10 {
                (rows, cols) = SIZES[rng.usize(..SIZES.len())];
                model.resize(rows, cols);
                late.resize(rows, cols);
                continue;
            }
            let bytes = piece(&mut rng, rows, cols);
            // Wherever output is cut into chunks, a client may join.
            let repeats = bytes.ends_with(b"b");
            let cut = if repeats { bytes.len() } else { rng.usize(..=bytes.len()) };
            let (first, rest) = bytes.split_at(cut);
            model.feed(first);
            if attached {
                late.feed(first);
            }
            if rng.u8(..) < 40 {
                let repaint = model.repaint(true);
                for query in QUERIES {
                    let found = repaint.windows(query.len()).any(|part| part == query.as_bytes());
                    assert!(!found, "seed {seed}: a repaint asks {query:?}");
                }
                if rng.bool() {
                    late = Screen::new(rows, cols);
                    late.feed(&repaint);
                    attached = true;
                }
            }
            model.feed(rest);
            if attached {
                late.feed(rest);
            }
            if attached {
                assert_same(&model, &late, seed);
            }
        }
    }
}

#[test]
fn a_repaint_of_the_visible_screen_replaces_anything_on_it() {
    for seed in seeds() {
        let mut rng = Rng::with_seed(seed);
        let (rows, cols) = SIZES[rng.usize(..SIZES.len())];
        let (mut model, mut other) = (Screen::new(rows, cols), Screen::new(rows, cols));
        for screen in [&mut model, &mut other] {
            for _ in 0..rng.usize(1..40) {
                let bytes = piece(&mut rng, rows, cols);
                feed(&mut [screen], &bytes);
            }
        }
        other.feed(&model.repaint(false));
        assert_eq!(model.text(), other.text(), "seed {seed}");
    }
}

#[test]
fn arbitrary_bytes_neither_panic_nor_grow_without_bound() {
    for seed in seeds() {
        let mut rng = Rng::with_seed(seed);
        let mut screen = Screen::new(rng.u16(..), rng.u16(..));
        for _ in 0..20 {
            let alphabet = b"\x1b[]?;0123456789hlmHJKrABCDPXLMST@\r\n\t\x08\x0e\x0f ab\xe6\xbc\xa2\xcc\x81\xff";
            let bytes: Vec<u8> = (0..200).map(|_| alphabet[rng.usize(..alphabet.len())]).collect();
            screen.feed(&bytes);
            if rng.u8(..) < 40 {
                screen.resize(rng.u16(..), rng.u16(..));
            }
        }
        let repaint = screen.repaint(true);
        let (rows, cols) = screen.size();
        let mut late = Screen::new(rows, cols);
        late.feed(&repaint);
        assert_eq!(screen.text(), late.text(), "seed {seed}");
    }
}
