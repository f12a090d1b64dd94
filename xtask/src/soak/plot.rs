//! Line plots as SVG, without a library and without anything that changes from run to run but the data.

use std::fmt::Write;

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 240.0;
const MARGIN: f64 = 56.0;
const COLORS: [&str; 3] = ["#1f6feb", "#d1495b", "#2e8b57"];

/// A named line of values at equal distances.
#[derive(Debug)]
pub(crate) struct Line<'a> {
    pub name: &'a str,
    pub values: Vec<f64>,
}

/// Draws lines over `seconds`, from 0 to a little above the largest value.
pub(crate) fn svg(title: &str, unit: &str, seconds: f64, lines: &[Line<'_>]) -> String {
    let values = lines.iter().flat_map(|line| line.values.iter().copied());
    let top = values.fold(0.0, f64::max).max(f64::MIN_POSITIVE) * 1.1;
    let x = |at: f64| MARGIN + at * (WIDTH - 2.0 * MARGIN);
    let y = |value: f64| HEIGHT - MARGIN / 2.0 - value / top * (HEIGHT - MARGIN * 1.25);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" \
         fill=\"#ffffff\"/>\n<text x=\"{MARGIN}\" y=\"18\" font-weight=\"bold\">{title} ({unit})</text>\n"
    );
    for share in [0.0, 0.5, 1.0] {
        let (value, height) = (top * share, y(top * share));
        let (left, right) = (x(0.0), x(1.0));
        let _ = writeln!(
            out,
            "<line x1=\"{left}\" y1=\"{height:.1}\" x2=\"{right}\" y2=\"{height:.1}\" \
             stroke=\"#d0d7de\"/><text x=\"{:.0}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            left - 6.0,
            height + 4.0,
            short(value)
        );
    }
    for share in [0.0, 0.5, 1.0] {
        let _ = writeln!(
            out,
            "<text x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"middle\">{} s</text>",
            x(share),
            HEIGHT - 8.0,
            short(seconds * share)
        );
    }
    for (number, line) in lines.iter().enumerate() {
        let color = COLORS[number % COLORS.len()];
        let last = (line.values.len().max(2) - 1) as f64;
        let points = line.values.iter().enumerate();
        let points =
            points.map(|(at, value)| format!("{:.1},{:.1}", x(at as f64 / last), y(*value)));
        let _ = writeln!(
            out,
            "<polyline fill=\"none\" stroke=\"{color}\" stroke-width=\"1.5\" points=\"{}\"/>\n\
             <text x=\"{:.0}\" y=\"18\" text-anchor=\"end\" fill=\"{color}\">{}</text>",
            points.collect::<Vec<_>>().join(" "),
            WIDTH - MARGIN - 120.0 * (lines.len() - 1 - number) as f64,
            line.name
        );
    }
    out.push_str("</svg>\n");
    out
}

/// A number with as many digits as help.
fn short(value: f64) -> String {
    if value >= 10.0 { format!("{value:.0}") } else { format!("{value:.1}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_is_a_point_inside_the_picture() {
        let line = Line { name: "a", values: vec![0.0, 5.0, 1000.0] };
        let drawn = svg("t", "u", 60.0, &[line]);
        let points = drawn.split("points=\"").nth(1).unwrap().split('"').next().unwrap();
        let points: Vec<_> = points.split(' ').collect();
        assert_eq!(points.len(), 3);
        for point in points {
            let (x, y) = point.split_once(',').unwrap();
            let (x, y): (f64, f64) = (x.parse().unwrap(), y.parse().unwrap());
            assert!((0.0..=WIDTH).contains(&x) && (0.0..=HEIGHT).contains(&y), "{point}");
        }
        assert!(
            svg("t", "u", 1.0, &[Line { name: "none", values: vec![] }]).contains("points=\"\"")
        );
    }
}
