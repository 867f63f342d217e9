package picture

import (
	"cmp"
	"fmt"
	"image/color"
	"slices"
	"strings"
	"time"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"

	"github.com/seed-4c80c132/coord/integration/history"
)

// Span is one stretch in which an owner held what a lane stands for.
type Span struct {
	Lane, Owner string
	Token       int64 // written in; 0: nothing
	From, To    time.Duration
}

// Mark is something that befell a run.
type Mark struct {
	At   time.Duration
	Text string
}

// Timeline is a run: a lane for each thing that can be held, a colour for each owner.
type Timeline struct {
	Title      string
	Begin, End time.Duration // the time at the left is 0
	Spans      []Span
	Marks      []Mark
}

// FromHistory is the timeline of a history. All owners of one worker, whose names
// have a "-" or "." after the worker's, have one colour.
func FromHistory(title string, events []history.Event) Timeline {
	t := Timeline{Title: title}
	for _, c := range history.Claims(events) {
		t.Spans = append(t.Spans, Span{c.Primitive + " " + c.Key, worker(c.Owner), c.Token, c.From, c.To})
		t.widen(c.From)
	}
	for _, e := range events {
		t.widen(e.At)
		if e.Kind == history.Fault {
			t.Marks = append(t.Marks, Mark{e.At, strings.TrimSpace(worker(e.Owner) + " " + e.Key)})
		}
	}
	return t
}

func worker(owner string) string {
	if i := strings.IndexAny(owner, "-."); i > 0 {
		return owner[:i]
	}
	return owner
}

func (t *Timeline) widen(at time.Duration) {
	if t.Begin == 0 || at < t.Begin {
		t.Begin = at
	}
	t.End = max(t.End, at)
}

// Save writes the timeline as SVG.
func (t Timeline) Save(file string) error {
	lanes, owners := t.names()
	legend := plot.NewLegend()
	p := newPlot(t.Title, "seconds", "")
	p.X.Tick.Marker = plot.TickerFunc(seconds)
	p.X.Min, p.X.Max = 0, (t.End - t.Begin).Seconds()
	p.Y.Min, p.Y.Max = -0.6, float64(len(lanes))-0.4+t.headroom()
	ticks := make(plot.ConstantTicks, len(lanes))
	for i, lane := range lanes {
		ticks[i] = plot.Tick{Value: float64(len(lanes) - 1 - i), Label: lane}
	}
	p.Y.Tick.Marker, p.Y.Tick.Length, p.Y.LineStyle.Width = ticks, 0, 0
	p.Add(&lanesOf{t, lanes, owners})
	for i, owner := range owners {
		legend.Add(owner, swatch{i})
	}
	return save(p, legend, 12*vg.Inch, vg.Length(1.4+0.3*float64(len(lanes)))*vg.Inch, 0.7*vg.Inch, file)
}

// seconds are whole ones, of which every few are written out.
func seconds(from, to float64) (ticks []plot.Tick) {
	every := max(1, int(to-from)/15)
	for s := 0; float64(s) <= to; s++ {
		t := plot.Tick{Value: float64(s)}
		if s%every == 0 {
			t.Label = fmt.Sprint(s)
		}
		ticks = append(ticks, t)
	}
	return ticks
}

// headroom is what the marks' texts need above the lanes: a few lines, so that they
// don't run into each other.
func (t Timeline) headroom() float64 {
	if len(t.Marks) == 0 {
		return 0
	}
	return markLines * markHeight
}

const (
	markLines  = 3
	markHeight = 0.6 // of a lane
)

// names are the lanes and the owners, in order: w10 comes after w9.
func (t Timeline) names() (lanes, owners []string) {
	for _, s := range t.Spans {
		lanes, owners = append(lanes, s.Lane), append(owners, s.Owner)
	}
	order := func(a, b string) int {
		return cmp.Or(cmp.Compare(strings.TrimRight(a, digits), strings.TrimRight(b, digits)), cmp.Compare(len(a), len(b)), cmp.Compare(a, b))
	}
	slices.SortFunc(lanes, order)
	slices.SortFunc(owners, order)
	return slices.Compact(lanes), slices.Compact(owners)
}

const digits = "0123456789"

// lanesOf draws the spans and marks.
type lanesOf struct {
	Timeline
	lanes, owners []string
}

// Plot implements plot.Plotter.
func (l *lanesOf) Plot(c draw.Canvas, p *plot.Plot) {
	x, y := p.Transforms(&c)
	at := func(d time.Duration) vg.Length { return x((min(max(d, l.Begin), l.End) - l.Begin).Seconds()) }
	for i := range l.lanes {
		c.StrokeLine2(draw.LineStyle{Color: pale, Width: vg.Points(0.5)}, c.Min.X, y(float64(i)), c.Max.X, y(float64(i)))
	}
	for _, s := range l.Spans {
		middle := float64(len(l.lanes) - 1 - slices.Index(l.lanes, s.Lane))
		l.span(c, s, at(s.From), at(s.To), y(middle-0.36), y(middle+0.36))
	}
	top := float64(len(l.lanes)) - 0.4
	for i, m := range l.Marks {
		line := top + markHeight*(float64(markLines-1-i%markLines)+0.2)
		c.StrokeLine2(draw.LineStyle{Color: red, Width: vg.Points(0.8), Dashes: []vg.Length{vg.Points(3), vg.Points(2)}}, at(m.At), c.Min.Y, at(m.At), y(line+markHeight*0.7))
		look, where := style(9, red, draw.XLeft), at(m.At)+vg.Points(2)
		if where+look.Width(m.Text) > c.Max.X { // It would run into the legend.
			look, where = style(9, red, draw.XRight), at(m.At)-vg.Points(2)
		}
		c.FillText(look, vg.Point{X: where, Y: y(line + markHeight*0.35)}, m.Text)
	}
}

// span draws one, with its token if that has room.
func (l *lanesOf) span(c draw.Canvas, s Span, from, to, low, high vg.Length) {
	corners := []vg.Point{{X: from, Y: low}, {X: to, Y: low}, {X: to, Y: high}, {X: from, Y: high}}
	c.FillPolygon(colours[slices.Index(l.owners, s.Owner)%len(colours)], corners)
	c.StrokeLines(draw.LineStyle{Color: dark, Width: vg.Points(0.4)}, append(corners, corners[0]))
	label, look := fmt.Sprint(s.Token), style(8, dark, draw.XCenter)
	if s.Token > 0 && look.Width(label)+vg.Points(2) < to-from {
		c.FillText(look, vg.Point{X: (from + to) / 2, Y: (low + high) / 2}, label)
	}
}

func style(size float64, colour color.Color, align text.XAlignment) text.Style {
	face := plotter.DefaultFont
	face.Variant, face.Size = "Sans", font.Length(size)
	return text.Style{Color: colour, Font: face, XAlign: align, YAlign: draw.YCenter, Handler: plot.DefaultTextHandler}
}

// swatch is an owner's colour in the legend.
type swatch struct{ i int }

// Thumbnail implements plot.Thumbnailer.
func (s swatch) Thumbnail(c *draw.Canvas) {
	c.FillPolygon(colours[s.i%len(colours)], []vg.Point{c.Min, {X: c.Max.X, Y: c.Min.Y}, c.Max, {X: c.Min.X, Y: c.Max.Y}})
}
