package main

import (
	"fmt"

	"github.com/seed-4c80c132/coord/integration/picture"
)

// draw writes the timeline of a run: a lane for each partition, a colour for each
// worker, the epochs written in.
func draw(h history, file string) error {
	t := picture.Timeline{Title: "Partitions and the workers that held them", Begin: h.Begin, End: h.End}
	for _, c := range h.Claims {
		t.Spans = append(t.Spans, picture.Span{Lane: fmt.Sprint("partition ", c.Partition), Owner: c.Worker, Token: c.Epoch, From: c.From, To: c.To})
	}
	if h.Killed != "" {
		t.Marks = append(t.Marks, picture.Mark{At: h.KilledAt, Text: h.Killed + " killed"})
	}
	return t.Save(file)
}
