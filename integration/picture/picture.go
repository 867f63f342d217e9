// Package picture draws what a run has shown, as SVG.
package picture

import (
	"bytes"
	"fmt"
	"image/color"
	"os"
	"slices"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// colours of the owners: they can be told apart by the colour-blind too, and black
// text can be read on each.
var colours = []color.Color{
	color.RGBA{0x8d, 0xbf, 0xe8, 0xff}, color.RGBA{0xf5, 0xb7, 0x6b, 0xff}, color.RGBA{0x8f, 0xd1, 0xa8, 0xff},
	color.RGBA{0xe3, 0xa0, 0xc9, 0xff}, color.RGBA{0xe9, 0xe0, 0x7a, 0xff}, color.RGBA{0xb9, 0xb3, 0xe6, 0xff},
	color.RGBA{0xc9, 0xc9, 0xc9, 0xff}, color.RGBA{0xe8, 0x9a, 0x8d, 0xff}, color.RGBA{0x9f, 0xdd, 0xdd, 0xff},
}

var (
	dark = color.RGBA{0x33, 0x33, 0x33, 0xff}
	red  = color.RGBA{0xc0, 0x20, 0x20, 0xff}
	pale = color.RGBA{0xdd, 0xdd, 0xdd, 0xff}
)

// newPlot is an empty one in the style of all.
func newPlot(title, x, y string) *plot.Plot {
	p := plot.New()
	p.Title.Text, p.X.Label.Text, p.Y.Label.Text = title, x, y
	p.Title.Padding = vg.Points(8)
	for _, font := range []*vg.Length{&p.Title.TextStyle.Font.Size, &p.X.Label.TextStyle.Font.Size, &p.Y.Label.TextStyle.Font.Size} {
		*font = vg.Points(12)
	}
	p.Title.TextStyle.Font.Variant = "Sans"
	for _, axis := range []*plot.Axis{&p.X, &p.Y} {
		axis.Label.TextStyle.Font.Variant, axis.Tick.Label.Font.Variant = "Sans", "Sans"
		axis.Label.Padding = vg.Points(4)
	}
	return p
}

// save writes a plot as SVG, with its legend in a strip at the right. Its font is not
// on every machine, so that it names others that will do.
func save(p *plot.Plot, legend plot.Legend, width, height, legendWidth vg.Length, file string) error {
	p.BackgroundColor = color.White
	canvas := vgsvg.New(width, height)
	all := draw.New(canvas)
	all.SetColor(color.White)
	all.Fill(all.Rectangle.Path())
	margin := vg.Points(10)
	p.Draw(draw.Crop(all, margin, -margin-legendWidth, margin, -margin))
	legend.Top, legend.Left, legend.ThumbnailWidth, legend.Padding = true, true, vg.Points(14), vg.Points(3)
	legend.TextStyle.Font.Variant = "Sans"
	legend.Draw(draw.Crop(all, width-legendWidth, -margin, margin, -vg.Points(40)))
	var svg bytes.Buffer
	if _, err := canvas.WriteTo(&svg); err != nil {
		return fmt.Errorf("draw %s: %w", file, err)
	}
	text := strings.ReplaceAll(svg.String(), "font-family:Liberation Sans;", "font-family:Liberation Sans,Arial,Helvetica,sans-serif;")
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		return fmt.Errorf("write picture: %w", err)
	}
	return nil
}

// Series is some values with a name.
type Series struct {
	Name   string
	Values []float64
}

// Histogram draws how values, none below 0, are spread, one series before the other.
func Histogram(file, title, x string, bins int, series ...Series) error {
	p, legend := newPlot(title, x, "how many"), plot.NewLegend()
	var all plotter.Values
	for _, s := range series {
		all = append(all, s.Values...)
	}
	width := slices.Max(all) / float64(bins)
	for i, s := range series {
		h := &plotter.Histogram{FillColor: translucent(colours[i]), Width: width, LineStyle: plotter.DefaultLineStyle}
		for b := range bins {
			h.Bins = append(h.Bins, plotter.HistogramBin{Min: float64(b) * width, Max: float64(b+1) * width})
		}
		for _, v := range s.Values {
			h.Bins[min(int(v/width), bins-1)].Weight++
		}
		p.Add(h)
		legend.Add(s.Name, h)
	}
	return save(p, legend, 8*vg.Inch, 4*vg.Inch, 1.2*vg.Inch, file)
}

func translucent(c color.Color) color.Color {
	r, g, b, _ := c.RGBA()
	return color.NRGBA{uint8(r >> 8), uint8(g >> 8), uint8(b >> 8), 0xb0}
}

// Line is a curve with a name.
type Line struct {
	Name string
	X, Y []float64
}

// Lines draws curves over logarithmic axes.
func Lines(file, title, x, y string, lines ...Line) error {
	p, legend := newPlot(title, x, y), plot.NewLegend()
	p.X.Scale, p.X.Tick.Marker = plot.LogScale{}, plot.LogTicks{Prec: -1}
	p.Y.Scale, p.Y.Tick.Marker = plot.LogScale{}, plot.LogTicks{Prec: -1}
	p.Add(plotter.NewGrid())
	for i, l := range lines {
		points := make(plotter.XYs, len(l.X))
		for j := range l.X {
			points[j] = plotter.XY{X: l.X[j], Y: l.Y[j]}
		}
		curve, dots, err := plotter.NewLinePoints(points)
		if err != nil {
			return fmt.Errorf("draw %s: %w", file, err)
		}
		curve.Color, curve.Width, dots.Color = strong[i%len(strong)], vg.Points(1.5), strong[i%len(strong)]
		p.Add(curve, dots)
		legend.Add(l.Name, curve, dots)
	}
	return save(p, legend, 8*vg.Inch, 4.5*vg.Inch, 1.2*vg.Inch, file)
}

// strong are colours of thin lines.
var strong = []color.Color{color.RGBA{0x1f, 0x6f, 0xb5, 0xff}, color.RGBA{0xd9, 0x7a, 0x12, 0xff}, color.RGBA{0x2c, 0x9a, 0x57, 0xff}}
