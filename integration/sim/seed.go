//go:build !exact

package sim

const exact = false

func seedRuntime(uint64) {}
