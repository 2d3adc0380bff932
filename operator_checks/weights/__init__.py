"""Are the two sides' weights really the same?"""
