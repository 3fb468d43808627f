//! Draws resident VRAM over time as a self-contained SVG image.

use std::fmt::Write;

use super::SimulationSummary;

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 360.0;
const LEFT: f64 = 70.0;
const TOP: f64 = 20.0;
const COLOURS: [&str; 8] =
    ["#0b7285", "#868e96", "#e67700", "#2b8a3e", "#c92a2a", "#5f3dc4", "#1864ab", "#a61e4d"];

/// Returns an SVG image with one line of resident VRAM for each policy. `end_ms`: end of the trace.
#[must_use]
pub fn svg(all: &[SimulationSummary], end_ms: u64) -> String {
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    let top = all.iter().map(|f| f.resident_peak_bytes).max().unwrap_or(1).max(1);
    let mut svg = String::new();
    let total = HEIGHT + TOP + 60.0 + 16.0 * all.len().div_ceil(4) as f64;
    let _ = write!(
        svg,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {total}\" font-family=\"sans-serif\" font-size=\"12\">\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>",
        WIDTH + LEFT + 20.0
    );
    for step in 0..=4 {
        let y = TOP + HEIGHT * f64::from(4 - step) / 4.0;
        let label = gib(top) * f64::from(step) / 4.0;
        let _ = write!(
            svg,
            "<line x1=\"{LEFT}\" x2=\"{}\" y1=\"{y}\" y2=\"{y}\" stroke=\"#dee2e6\"/>\
             <text x=\"{}\" y=\"{}\" text-anchor=\"end\">{label:.0} GiB</text>",
            LEFT + WIDTH,
            LEFT - 6.0,
            y + 4.0
        );
    }
    let days = end_ms as f64 / 86_400_000.0;
    let every = (days / 14.0).ceil().max(1.0);
    let mut day = 0.0;
    while day <= days {
        let x = LEFT + WIDTH * day / days;
        let _ = write!(svg, "<text x=\"{x}\" y=\"{}\">day {day:.0}</text>", TOP + HEIGHT + 18.0);
        day += every;
    }
    for (n, figures) in all.iter().enumerate() {
        let colour = COLOURS[n % COLOURS.len()];
        let dash = if n < COLOURS.len() { "" } else { " stroke-dasharray=\"4 3\"" };
        let points: Vec<String> = figures
            .resident_over_time
            .iter()
            .enumerate()
            .map(|(at, bytes)| {
                let x = LEFT + WIDTH * at as f64 / figures.resident_over_time.len() as f64;
                format!("{x:.1},{:.1}", TOP + HEIGHT * (1.0 - *bytes as f64 / top as f64))
            })
            .collect();
        let (x, y) = (LEFT + 240.0 * (n % 4) as f64, TOP + HEIGHT + 40.0 + 16.0 * (n / 4) as f64);
        let _ = write!(
            svg,
            "<polyline fill=\"none\" stroke=\"{colour}\"{dash} points=\"{}\"/>\
             <text x=\"{x}\" y=\"{y}\" fill=\"{colour}\">{}</text>",
            points.join(" "),
            figures.policy
        );
    }
    svg.push_str("</svg>\n");
    svg
}
